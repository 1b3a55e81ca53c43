"""``samestep.Trainer`` in scripts as Lightning's tutorials have them, on one and two ranks."""

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from library.tests.kit import Net, batches, check_same, fit, rows, weights
from library.tests.programs import environment, free_port, run, run_code, run_ranks
from samestep import Trainer, arguments
from samestep.errors import ConfigError
from samestep.plugins import starting
from samestep.ranks import run_dirs
from samestep.run import record
from samestep.run.copies import KeepsCopy
from samestep.trainer import front_end_of_script

SCRIPT = """
import json
import os
import signal
import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samestep import BatchLoader, Trainer


class LitNet(L.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if f"{self.global_step} {self.global_rank}" == os.environ.get("AT"):
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self.net(x), y))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class LitData(L.LightningDataModule):
    def setup(self, stage):
        x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
        self.set = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return BatchLoader(self.set, 16, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.set, batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader
"""
MAIN = """

if __name__ == "__main__":
    trainer_options, model_options = map(json.loads, sys.argv[1:])
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, **trainer_options)
    model = LitNet(**model_options)
    trainer.fit(model, datamodule=LitData())
    result = trainer.test(model, datamodule=LitData())
    if trainer.is_global_zero:
        print("tested", result[0]["test_loss"])
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SAMESTEP_RUN = ("-m", "samestep", "run", "--nproc-per-node=2")
BASE = {"seed": 1, "max_epochs": 2, "monitor": "val_loss", "mode": "min"}  # 6 steps an epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "script.py").write_text(SCRIPT + MAIN)
    return folder


def train(
    folder: Path,
    name: str,
    launcher: tuple[str, ...] = (),
    model: dict[str, Any] | None = None,
    variables: dict[str, str] | None = None,
    ranks: int = 0,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run the script with these arguments of the Trainer, as ``python script.py`` or otherwise."""
    alone = {} if launcher or ranks else {"devices": 1}
    arguments = {**BASE, "run_dir": name, **alone, **options}
    words = [*launcher, "script.py", json.dumps(arguments), json.dumps(model or {})]
    nodes = (ranks,) if ranks else ()
    return run_ranks(*words, nodes=nodes, cwd=folder, **(variables or {}))


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """A run of two ranks, started by ``devices=2``, that nothing has disturbed."""
    done = train(folder, "two", devices=2)
    assert done.returncode == 0, done.stderr
    return folder / "two"


@pytest.mark.program
def test_a_run_that_is_stopped_and_killed_ends_like_an_undisturbed_one(folder: Path, two: Path):
    """Under each launcher. More of one process: test_distribution.py."""

    def disturb(step: int, signum: int, *launcher: str, **options: Any) -> Any:
        variables = {"AT": f"{step} 1", "SIGNAL": str(int(signum))}  # of the last rank
        return train(folder, "disturbed", launcher, variables=variables, **options)

    stopped = disturb(2, signal.SIGTERM, *SAMESTEP_RUN)
    assert stopped.returncode == 143, stopped.stderr
    assert "To continue: the same command" in stopped.stdout
    killed = disturb(8, signal.SIGKILL, ranks=2, save_every_s=1e-9)
    assert killed.returncode == 1, killed.stderr  # of the lowest rank
    done = train(folder, "disturbed", TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert "Continuing: disturbed" in done.stdout
    assert done.stdout.count("tested") == 1
    check_same(folder / "disturbed", two)
    # Only rank zero looks into the run directory.
    check_rejected(train(folder, "disturbed", SAMESTEP_RUN, model={"lr": 0.5}))


@pytest.mark.program
def test_what_all_ranks_reject_is_one_message(folder: Path):
    check_rejected(train(folder, "rejected", ranks=2, shares=[1, 2, 3]))


def check_rejected(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.program
def test_two_tasks_of_srun_are_two_ranks(folder: Path, two: Path):
    words = ["script.py", json.dumps({**BASE, "run_dir": "srun"}), "{}"]
    shared = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "SLURM_NTASKS": "2",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip

    def task(rank: str) -> subprocess.CompletedProcess[str]:
        return run(*words, cwd=folder, SLURM_PROCID=rank, SLURM_LOCALID=rank, **shared)

    with ThreadPoolExecutor() as threads:
        tasks = list(threads.map(task, ["0", "1"]))
    assert [task.returncode for task in tasks] == [0, 0], tasks
    check_same(folder / "srun", two)


@pytest.mark.program
def test_two_ranks_learn_what_one_rank_learns(folder: Path, two: Path):
    done = train(folder, "one")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(weights(folder / "one"), weights(two), rtol=1e-5, atol=1e-5)


class Rated(Net):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lambda module: torch.optim.Adam(module.parameters(), lr))
        self.save_hyperparameters()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


def test_a_finished_run_is_tested_again_and_trained_on_only_if_a_limit_is_higher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fit(tmp_path / "whole", Rated)
    run_dir, seen = tmp_path / "mine", []
    fit(run_dir, Rated, max_epochs=1)
    for said in ("trainer.max_epochs: 1 -> 2", "Nothing to do"):
        (part,) = fit(run_dir, Rated)
        assert said in capsys.readouterr().out
        check_same(run_dir, tmp_path / "whole") if not seen else None
        tested = part.trainer.test(part.module, batches(shuffle=False), verbose=False)
        seen.append((tested, rows(run_dir), (run_dir / "metrics.json").read_text()))
    assert seen[0] == seen[1]
    ((first,), _, figures), _ = seen
    assert json.loads(figures)["test_loss"] == first["test_loss"]
    # Other hyperparameters are another run.
    with pytest.raises(ConfigError, match=r"model.lr: 0.01 -> 0.5"):
        fit(run_dir, lambda: Rated(0.5), max_epochs=3)
    fit(run_dir, lambda: Rated(0.5), max_epochs=3, allow_changes=["model.lr"])


class AddsGroup(Net):
    """Gives its optimizer a group of parameters in the first epoch, at half its rate."""

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.rate = rate

    def configure_optimizers(self):
        return torch.optim.SGD(self.body.parameters(), self.rate, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 0:
            self.optimizers().optimizer.add_param_group(
                {"params": list(self.head.parameters()), "lr": self.rate / 2}
            )


def second_phase(observer: Any, limit: str, value: int) -> None:
    """Raise a limit in the object, change the rate, and train on with the same Trainer."""
    trainer, module = observer.trainer, observer.module
    loop = trainer.fit_loop if limit == "max_epochs" else trainer.fit_loop.epoch_loop
    setattr(loop, limit, value)
    module.rate = 0.001
    trainer.fit(module, batches(), batches(shuffle=False))


@pytest.mark.program
@pytest.mark.parametrize(("limit", "first", "then"), [("max_epochs", 1, 3), ("max_steps", 4, 10)])
def test_a_second_fit_with_a_higher_limit_is_like_a_second_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str, first: int, then: int
):
    options = {"max_epochs": -1} | {limit: first}
    whole, phases = tmp_path / "whole", tmp_path / "phases"
    fit(whole, AddsGroup, **options)
    fit(whole, lambda: AddsGroup(0.001), **options | {limit: then})
    (part,) = fit(phases, AddsGroup, **options)
    second_phase(part, limit, then)
    check_same(phases, whole)
    assert part.trainer.global_step == (12 if limit == "max_epochs" else 10)
    assert f"trainer.{limit}: {first} -> {then}" in capsys.readouterr().out
    groups = part.trainer.optimizers[0].param_groups
    assert [group["lr"] for group in groups] == pytest.approx([0.001, 0.005])
    # A third one has nothing to do, and neither has another process with this limit.
    part.trainer.fit(part.module, batches(), batches(shuffle=False))
    fit(phases, AddsGroup, **options | {limit: then})
    assert capsys.readouterr().out.count("Nothing to do") == 2


def test_a_module_gets_the_weights_of_a_run_that_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A script goes on with its module, in every start: it saves it, or predicts."""
    (trained,) = fit(tmp_path, AddsGroup)
    (again,) = fit(tmp_path, AddsGroup)
    assert "Nothing to do" in capsys.readouterr().out
    first, last = again.module.state_dict(), trained.module.state_dict()
    assert all(torch.equal(first[name], last[name]) for name in last)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    fit(tmp_path, AddsGroup)
    assert "keeps its first weights and not those of the run, as its" in capsys.readouterr().out


@pytest.mark.program
def test_weights_that_a_script_changes_between_two_fits_are_announced_as_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (part,) = fit(tmp_path, Rated, max_epochs=1, monitor="val_loss")
    second_phase(part, "max_epochs", 2)
    part.trainer.test(part.module, batches(shuffle=False), verbose=False)
    second_phase(part, "max_epochs", 3)
    assert "Note: the weights" not in capsys.readouterr().out
    with torch.no_grad():
        part.module.head.bias.add_(1)
    second_phase(part, "max_epochs", 4)
    assert "Note: the weights of the module were changed" in capsys.readouterr().out


def test_a_signal_after_the_results_are_written_stops_the_script(tmp_path: Path):
    class Copies(KeepsCopy):
        left = 1

        def flush(self) -> None:
            if Copies.left:
                Copies.left = 0
                os.kill(os.getpid(), signal.SIGTERM)

    parts = fit(tmp_path, Rated, max_epochs=1, callbacks=lambda: [Copies()])
    assert len(parts) == 2, "the first one was stopped, and the second has nothing to do"
    assert parts[1].seen == []
    assert record.read(tmp_path).state == record.FINISHED


@pytest.mark.program
@torch.compiler.set_stance("force_eager")  # to compile takes half a minute
def test_a_compiled_module_is_tested_as_itself_and_as_what_it_was(tmp_path: Path):
    trainer = Trainer(
        run_dir=tmp_path, max_epochs=1, accelerator="cpu", enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Rated()
    compiled = torch.compile(module, backend="eager")
    trainer.fit(compiled, batches(), batches(shuffle=False))
    tested = []
    for given in ((compiled,), (module,), ()):
        for function in (trainer.test, trainer.validate):
            loader = batches(shuffle=False)
            tested.append(function(*given, dataloaders=loader, verbose=False))
    assert tested[:2] == tested[2:4] == tested[4:]
    assert tested[0][0]["test_loss"] > 0
    assert "class: library.tests.test_trainer.Rated" in (tmp_path / "config.yaml").read_text()


def result_of_test(trainer: Any, *models: Any, **options: Any) -> Any:
    return trainer.test(*models, dataloaders=batches(shuffle=False), verbose=False, **options)


def weights_of_lightning(path: str) -> Any:
    """What Lightning itself finds with the weights of a file."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    plain = L.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet)
    return result_of_test(plain, Rated.load_from_checkpoint(path))


class Worsens(Rated):
    """Its second epoch is the best one by this score, whatever it learns."""

    def on_validation_epoch_end(self):
        self.log("score", [3.0, 1.0, 2.0][self.current_epoch])


@pytest.mark.parametrize("save_weights_only", [False, True])
def test_best_is_that_of_the_users_own_saver_where_the_run_has_no_monitor(
    tmp_path: Path, save_weights_only: bool
):
    savers = []

    def callbacks() -> list[L.Callback]:
        saver = ModelCheckpoint(monitor="score", save_weights_only=save_weights_only)
        savers.append(saver)
        return [saver]

    fit(tmp_path, Worsens, places=[(2, 1)], callbacks=callbacks, max_epochs=3)
    (part,) = fit(tmp_path, Worsens, callbacks=callbacks, max_epochs=3)  # nothing to do
    trainer, module, saver = part.trainer, part.module, savers[-1]
    assert trainer.checkpoint_callback is saver
    assert saver.best_model_path == savers[1].best_model_path
    assert Path(saver.best_model_path).name == "epoch=1-step=8.ckpt"
    best = weights_of_lightning(saver.best_model_path)
    last = weights_of_lightning(trainer.checkpoint_callbacks[-1].last_model_path)
    assert best != last
    assert result_of_test(trainer, module, ckpt_path="best") == best
    assert result_of_test(trainer, ckpt_path=saver.best_model_path) == best
    assert result_of_test(trainer) == best  # as in Lightning
    assert result_of_test(trainer, module) == last
    # In a process that has trained nothing.
    fresh = Trainer(
        run_dir=tmp_path, callbacks=callbacks(), accelerator="cpu", enable_progress_bar=False
    )
    assert result_of_test(fresh, Worsens(), ckpt_path="best") == best


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_what_is_handed_to_test_is_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = {"monitor": "score", "max_epochs": 3}
    saver = ModelCheckpoint(monitor="val_loss")
    (part,) = fit(tmp_path, Worsens, callbacks=lambda: [saver], **options)
    trainer, module = part.trainer, part.module
    best = weights_of_lightning(str(tmp_path / "checkpoints/best.ckpt"))
    for given in ((module,), ()):
        assert result_of_test(trainer, *given) == best
    assert "Note" not in capsys.readouterr().out
    assert result_of_test(trainer, module, ckpt_path="best") == best
    assert "not the best of ModelCheckpoint, by val_loss" in capsys.readouterr().out
    # Another module, whatever its weights are from.
    other = Rated()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    plain = L.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path / "x", **quiet)
    plain.fit(other, batches(), batches(shuffle=False))
    wanted = weights_of_lightning(plain.checkpoint_callback.best_model_path)
    assert wanted != best
    assert result_of_test(trainer, other) == wanted
    # And a file that Lightning has written.
    assert (
        result_of_test(trainer, module, ckpt_path=plain.checkpoint_callback.best_model_path)
        == wanted
    )


def test_the_saver_of_a_run_has_the_attributes_of_lightnings(tmp_path: Path):
    seen = []

    class Reads(L.Callback):
        def on_train_start(self, trainer, pl_module) -> None:
            seen.append(trainer.checkpoint_callback.best_model_path)

    options = {"monitor": "score", "max_epochs": 3, "callbacks": lambda: [Reads()]}
    for _ in range(2):  # the second one has nothing to do
        (part,) = fit(tmp_path / "one", Worsens, **options)
        saver = part.trainer.checkpoint_callback
        assert saver.best_model_path == str(tmp_path / "one/checkpoints/best.ckpt")
        assert saver.last_model_path == str(tmp_path / "one/checkpoints/last.ckpt")
        assert torch.equal(saver.best_model_score, torch.tensor(1.0))
        assert saver.best_k_models == {saver.best_model_path: saver.best_model_score}
        assert float(part.trainer.callback_metrics["score"]) == 2.0
    assert seen == [""]
    (part,) = fit(tmp_path / "two", Worsens, max_epochs=1)
    saver = part.trainer.checkpoint_callback
    assert saver.best_model_path == saver.last_model_path == str(saver.last)
    assert (saver.best_model_score, saver.best_k_models) == (None, {})


def test_bar_and_summary_of_lightning_are_there_once_after_continuing(tmp_path: Path, capsys):
    def bars() -> list[L.Callback]:
        # Without a limit it would draw some of the steps only.
        return [TQDMProgressBar(refresh_rate=1)]

    shown = {"enable_progress_bar": True, "enable_model_summary": True, "callbacks": bars}
    parts = fit(tmp_path / "one", places=[(1, 1)], **shown)
    printed = capsys.readouterr().out
    assert printed.count("Trainable params") == len(parts) == 2
    before, after = printed.split("Continuing: ")
    counts = [
        [int(count) for count in re.findall(r"Epoch 1:[^\r\n]*? (\d)/4 ", part)]
        for part in (before, after)
    ]
    assert sorted({*counts[0]}) == [0, 1, 2]
    # Where the bar is made it knows nothing of the epoch yet.
    assert sorted({*counts[1]}) == [0, 3, 4]


def find_rate(model: L.LightningModule, trainer: L.Trainer) -> None:
    Tuner(trainer).lr_find(model, batches(), num_training=30, early_stop_threshold=None)


@pytest.mark.program
def test_a_tuner_is_one_line_and_its_remedy_continues(tmp_path: Path):
    run_dir = tmp_path / "run"
    trainer = Trainer(run_dir=run_dir, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(ConfigError, match=r"^Tuner.lr_find: is not supported .*lightning.Trainer"):
        find_rate(Rated(), trainer)
    with pytest.raises(ConfigError, match=r"^Tuner.scale_batch_size: is not supported"):
        Tuner(trainer).scale_batch_size(Rated(), dataloaders=batches(), method="validate")
    assert not run_dir.exists()
    code = (
        "import sys; from lightning.pytorch.tuner import Tuner; from samestep import Trainer\n"
        "from library.tests.test_trainer import Rated, batches\n"
        "trainer = Trainer(run_dir=sys.argv[1], accelerator='cpu')\n"
        "Tuner(trainer).scale_batch_size(Rated(), dataloaders=batches())"
    )
    done = run_code(code, str(run_dir), nodes=(2,))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: Tuner.scale_batch_size: is not supported") == 1
    assert "Traceback" not in done.stderr

    def tuned() -> Rated:
        model = Rated()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        find_rate(model, L.Trainer(accelerator="cpu", **quiet))
        assert model.hparams["lr"] != 0.01
        return model

    with warnings.catch_warnings():
        # Of Lightning's own Trainer.
        warnings.simplefilter("ignore")
        fit(run_dir, tuned, max_epochs=1)
        fit(run_dir, tuned)


@pytest.mark.program
def test_a_template_that_names_lightnings_folders_changes_nothing_else(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """As the leading Hydra template: one folder for all, a saver within, the model made first."""
    monkeypatch.setattr("samestep.arguments._noted", set())
    model, folder = Net(), str(tmp_path / "run")
    saver = ModelCheckpoint(folder + "/checkpoints", "epoch_{epoch:03d}", monitor="val_loss")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(
        run_dir=folder, default_root_dir=folder, callbacks=[saver], min_epochs=1, max_epochs=2,
        **quiet,
    )  # fmt: skip
    trainer.fit(model=model, train_dataloaders=batches(), val_dataloaders=batches(), ckpt_path=None)
    path = Path(trainer.checkpoint_callback.best_model_path)
    assert path.parent == tmp_path / "run/model_checkpoints"
    given = {"dataloaders": batches(shuffle=False), "verbose": False}
    trainer.test(model=model, ckpt_path=str(path), **given)
    out = capsys.readouterr().out
    assert "ModelCheckpoint saves to " in out
    assert "no effect" not in out


def test_a_process_that_becomes_the_agent_leaves_the_notes_to_its_ranks(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("samestep.arguments._noted", set())
    monkeypatch.setattr(run_dirs, "hand_on", lambda: None)
    monkeypatch.setattr(starting, "this_program", list)
    monkeypatch.setattr(starting, "become_agent", lambda *program, **options: sys.exit(3))
    saver = ModelCheckpoint(tmp_path / "checkpoints")
    options: Any = {"accelerator": "cpu", "default_root_dir": "logs", "callbacks": saver}
    with pytest.raises(SystemExit, match="3"):
        Trainer(run_dir=tmp_path, devices=2, **options)
    assert capsys.readouterr().out == ""
    Trainer(run_dir=tmp_path, devices=1, **options)
    assert capsys.readouterr().out.count("Note: ") == 2


CONTRADICTIONS = {
    "Trainer(run_dir='r', overfit_batches=1)": "overfit_batches=1",
    "Trainer(run_dir='r', reload_dataloaders_every_n_epochs=1)": "reload_dataloaders_every",
    "Trainer(run_dir='r', strategy='deepspeed')": "strategy=deepspeed",
    "Trainer(run_dir='r', strategy='ddp_spawn')": "strategy=ddp_spawn",
    "Trainer(run_dir='r', callbacks=[LearningRateFinder()])": "LearningRateFinder",
    "Trainer(run_dir='r').fit(LitNet(), LitData(), ckpt_path='other.ckpt')": "ckpt_path=other",
}
EACH = """
import traceback
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from samestep import ConfigError
for code in sys.argv[1:]:
    try:
        eval(code)
    except ConfigError as error:
        print(str(error).replace(chr(10), " "))
    else:
        print("accepted")
Trainer(run_dir="r", barebones=True)
"""


@pytest.mark.program
def test_arguments_that_contradict_a_run_are_one_line_each(tmp_path: Path):
    done = run_code(SCRIPT + EACH, *CONTRADICTIONS, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    *_, line = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert line.startswith("error: barebones=True: is not supported: ")
    lines = done.stdout.splitlines()
    for line, (code, part) in zip(lines, CONTRADICTIONS.items(), strict=True):
        assert line.startswith((part, "callbacks: " + part)), (code, line)
    assert not (tmp_path / "r").exists()


SURVIVES = """
import faulthandler
class Broken(LitNet):
    def training_step(self, batch, batch_idx):
        raise LookupError("of my own")
countdown = []
faulthandler.dump_traceback_later = lambda *_, **__: countdown.append("begun")
faulthandler.cancel_dump_traceback_later = lambda: countdown.append("stopped")
trainer = Trainer(run_dir="r", accelerator="cpu", enable_progress_bar=False)
try:
    trainer.fit(Broken(), LitData())
except LookupError:
    print("begun" in countdown, countdown[-1], flush=True)
    raise
"""


@pytest.mark.program
def test_an_error_of_the_script_is_an_ordinary_traceback_and_nobody_watches_it(tmp_path: Path):
    done = run_code(SCRIPT + SURVIVES, cwd=tmp_path)
    assert (done.returncode, "True stopped" in done.stdout) == (1, True)
    assert done.stderr.startswith("Traceback") or "\nTraceback" in done.stderr
    assert done.stderr.rstrip().endswith("LookupError: of my own")


@pytest.mark.program
def test_callbacks_loggers_and_stages_of_lightning_work(tmp_path: Path):
    code = (
        SCRIPT
        + """
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
options = {"accelerator": "cpu", "enable_progress_bar": False, "max_epochs": 1}
tracker = TensorBoardLogger("boards")
class Logs(LitNet):
    def on_fit_start(self):
        assert self.logger is tracker
    def train_dataloader(self):
        return self.loaders.train_dataloader()
    def val_dataloader(self):
        return self.loaders.val_dataloader()
model = Logs()
model.loaders = LitData()
model.loaders.setup("fit")
own = ModelCheckpoint(monitor="val_loss", save_last=True)
config = {"lr": 1, "api_key": "abcdefgh1234"}
trainer = Trainer(run_dir="r", logger=tracker, callbacks=own, config=config, **options)
trainer.fit(model)
assert own.best_model_path and own.last_model_path
assert Path(own.last_model_path).parent.absolute() == Path("r/model_checkpoints").absolute()
assert (text := Path("r/config.yaml").read_text()) and "abcdefgh" not in text and "lr: 1" in text
assert trainer.validate(datamodule=LitData())[0]["val_loss"] > 0
assert len(trainer.predict(datamodule=LitData())) == 6
trainer = Trainer(run_dir="fast", fast_dev_run=True, **options)
trainer.fit(LitNet(), LitData())
assert not Path("fast").exists()
"""
    )
    done = run_code(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_hydra_takes_the_class_and_the_program_keeps_its_hook(tmp_path: Path):
    instantiate = pytest.importorskip("hydra.utils").instantiate
    before = sys.excepthook
    sys.excepthook = sys.__excepthook__  # an earlier test may have left that of its Trainer
    try:
        options = {"run_dir": str(tmp_path), "accelerator": "cpu", "devices": 1}
        config = {"_target_": "samestep.Trainer", **options}
        # As the leading Hydra template, whose lists become ListConfigs.
        saver, tracker = ModelCheckpoint(), CSVLogger(tmp_path)
        for _ in range(2):
            trainer = instantiate(config, callbacks=[saver], logger=[tracker], plugins=[])
            assert isinstance(trainer, Trainer)
            assert saver in trainer.callbacks
            assert trainer.loggers[0] is tracker
        assert sys.excepthook.before is sys.__excepthook__  # type: ignore[attr-defined]
        seen = []
        sys.excepthook.before = lambda *error: seen.append(error[0])  # type: ignore[attr-defined]
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert seen == [KeyboardInterrupt]
    finally:
        sys.excepthook = before


def test_a_subclass_that_saves_the_configuration_of_lightning_cli_saves_it_beside_ours(
    tmp_path: Path,
):
    cli: Any = pytest.importorskip("lightning.pytorch.cli")

    class Own(cli.SaveConfigCallback):
        """As in Lightning's documentation, where it also tells a logger."""

    saver = Own(None, None)
    arguments.place_callbacks([saver], tmp_path)
    assert (saver.config_filename, saver.overwrite) == ("cli.yaml", True)
    front_end = front_end_of_script(tmp_path, [saver])
    assert front_end.option_names == {"allow_changes": "--trainer.allow_changes"}


class Sized(L.LightningDataModule):
    """Is false: it has a length, of zero until it is set up."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def __len__(self) -> int:
        return 0

    def train_dataloader(self):
        return batches(size=self.hparams.size)

    def val_dataloader(self):
        return batches(shuffle=False)


def test_a_data_module_that_is_false_is_one(tmp_path: Path):
    fit(tmp_path, data=lambda: Sized(4), max_epochs=1)
    assert "class: library.tests.test_trainer.Sized" in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"data.size"):
        fit(tmp_path, data=lambda: Sized(8), max_epochs=2)


@pytest.mark.program
def test_lightning_cli(tmp_path: Path):
    library = pytest.importorskip("jsonargparse", reason='pip install "jsonargparse[signatures]"')
    path = f"{environment()['PYTHONPATH']}:{Path(library.__file__).parents[1]}"
    cli = """
from lightning.pytorch.cli import LightningCLI
if __name__ == "__main__":
    LightningCLI(LitNet, LitData, trainer_class=Trainer)
"""
    code = SCRIPT.replace("lr=0.01", "lr: float = 0.01") + cli
    (tmp_path / "cli.py").write_text(code)

    def fit(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        fixed = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2", f"--trainer.run_dir={name}"]
        return run("cli.py", "fit", *fixed, *words, cwd=tmp_path, PYTHONPATH=path, **variables)

    done = fit("mine")
    assert done.returncode == 0, done.stderr
    rejected = fit("mine", "--model.lr=0.5")
    assert rejected.returncode == 2
    assert "Traceback" not in rejected.stderr
    assert "'--trainer.allow_changes=[model.lr]'" in rejected.stderr
