"""The user's own ModelCheckpoint saves and names what it does under ``lightning.Trainer``."""

from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from library.tests.kit import Net, Scores, batches, check_exact, fit, on_ranks
from samestep.callbacks.checkpoints import place_model_checkpoint
from samestep.errors import ConfigError
from samestep.run import lifecycle
from samestep.run.checkpoint import find_valid, load

SCORES = 3.0, 1.0, 2.0, 1.0, 4.0  # the best one twice
SAVERS: dict[str, dict[str, Any]] = {
    "best two, and last": {"monitor": "val/score", "save_top_k": 2, "save_last": True},
    "one name": {
        "monitor": "val/score", "mode": "max", "save_top_k": -1, "filename": "best",
        "save_on_train_epoch_end": True,
    },
    "weights": {"monitor": "val/score", "save_weights_only": True, "every_n_epochs": 2},
    "no metric": {"save_last": "link"},
    "steps": {"monitor": "train_loss", "every_n_train_steps": 3, "save_top_k": 3},
    "steps, validated": {
        "monitor": "val/score", "every_n_train_steps": 2, "filename": "{epoch}-{train_loss:.3f}",
    },
}  # fmt: skip


def quiet_trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip


def make_savers(folder: Path) -> list[ModelCheckpoint]:
    return [ModelCheckpoint(folder / name, **options) for name, options in SAVERS.items()]


def what_scripts_read(saver: ModelCheckpoint) -> dict[str, Any]:
    """Paths without the folder, scores, and the step of each file."""
    folder = Path(str(saver.dirpath))
    paths = saver.best_model_path, saver.last_model_path, saver.kth_best_model_path
    files = {path.name: torch.load(path)["global_step"] for path in folder.iterdir()}
    return {
        "names": [Path(path).name for path in paths],
        "best": {Path(path).name: float(score) for path, score in saver.best_k_models.items()},
        "score": saver.best_model_score,
        "files": files,
    }


def fit_with_savers(run_dir: Path, *places: Any, how: str = "SIGTERM") -> list[Any]:
    """What scripts read of each saver, and of early stopping, in the last process of a run."""
    savers: list[ModelCheckpoint] = []
    stopping: list[EarlyStopping] = []

    def callbacks() -> list[L.Callback]:
        savers[:] = make_savers(run_dir / "kept")
        stopping[:] = [EarlyStopping("train_loss", patience=100)]
        return [*savers, *stopping]

    data = {"data": lambda: batches(shuffle=False), "max_epochs": 5}
    fit(run_dir, lambda: Scores(*SCORES), places=places, how=how, callbacks=callbacks, **data)
    return [*map(what_scripts_read, savers), *map(EarlyStopping.state_dict, stopping)]


def test_it_names_the_same_files_as_in_lightning_also_after_interruptions(tmp_path: Path):
    plain = make_savers(tmp_path / "plain")
    stopping = EarlyStopping("train_loss", patience=100)
    trainer = quiet_trainer(max_epochs=5, log_every_n_steps=1, callbacks=[*plain, stopping])
    trainer.fit(Scores(*SCORES), batches(shuffle=False), batches(shuffle=False))
    wanted = [*map(what_scripts_read, plain), stopping.state_dict()]
    assert fit_with_savers(tmp_path / "whole") == wanted
    # The last start takes one epoch, in which nothing is the best one.
    places = (1, 1), (2, "validation"), (3, 2), (3, "validation"), (4, 1)
    assert fit_with_savers(tmp_path / "stopped", *places) == wanted
    assert fit_with_savers(tmp_path / "killed", *places, how="SIGKILL") == wanted
    # "Nothing to do": a script reads the same when it is started again.
    assert fit_with_savers(tmp_path / "killed") == wanted


def test_the_best_is_that_of_all_processes_where_each_has_a_folder_of_its_own(tmp_path: Path):
    """As in the leading Hydra template, whose folders have the time in their names."""
    folders = iter("abc")
    savers: list[ModelCheckpoint] = []

    def callbacks() -> list[L.Callback]:
        folder = tmp_path / next(folders)
        savers.append(ModelCheckpoint(folder, monitor="val/score", filename="{epoch}"))
        return [*savers[-1:]]

    data: Any = {"data": lambda: batches(shuffle=False), "callbacks": callbacks, "max_epochs": 4}
    fit(tmp_path / "run", lambda: Scores(3.0, 1.0, 2.0, 1.5), places=[(2, 1)], **data)
    # "Nothing to do": a script tests the same file.
    (part,) = fit(tmp_path / "run", lambda: Scores(3.0, 1.0, 2.0, 1.5), **data)
    best = str(tmp_path / "a/epoch=1.ckpt")
    part.trainer.test(part.module, batches(shuffle=False), ckpt_path=best, verbose=False)
    for saver in savers:
        assert saver.best_model_path == best
        assert saver.best_model_score == 1.0
    assert [str(path) for path in tmp_path.glob("?/*.ckpt")] == [best]


def test_what_another_run_of_this_name_has_left_elsewhere_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def callbacks() -> list[L.Callback]:
        return [ModelCheckpoint(tmp_path / "kept", filename="mine", save_top_k=-1)]

    fit(tmp_path / "one/run", callbacks=callbacks, max_epochs=1)
    # run.json has the start of a run in whole seconds.
    later = SimpleNamespace(now=lambda: datetime.now() + timedelta(seconds=1))
    monkeypatch.setattr(lifecycle, "datetime", later)
    fit(tmp_path / "two/run", callbacks=callbacks, max_epochs=1)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"mine.ckpt", "mine-v1.ckpt"}


def test_its_folder_is_another_one_than_that_of_the_run(tmp_path: Path, capsys):
    class Brings(Net):
        def configure_callbacks(self):
            return [ModelCheckpoint(filename="mine", save_last=True)]

    (part,) = fit(tmp_path / "run", Brings)
    assert sorted(path.name for path in (tmp_path / "run/model_checkpoints").iterdir()) == [
        "last.ckpt", "mine.ckpt",
    ]  # fmt: skip
    assert part.trainer.checkpoint_callback.best_model_path.endswith("model_checkpoints/mine.ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    saver = ModelCheckpoint(tmp_path / "run/checkpoints")
    place_model_checkpoint(saver, tmp_path / "link")
    assert "Note: ModelCheckpoint saves to" in capsys.readouterr().out
    assert saver.dirpath == str(tmp_path / "link/model_checkpoints")


def test_a_stop_is_no_error_after_which_it_saves(tmp_path: Path):
    def names_in(folder: Path, *places: Any) -> set[str]:
        def callbacks() -> list[L.Callback]:
            saver = ModelCheckpoint(folder)
            saver.save_on_exception = True  # an argument since Lightning 2.6
            return [saver]

        fit(folder / "run", places=places, callbacks=callbacks)
        return {path.name for path in folder.iterdir()}

    assert names_in(tmp_path / "stopped", (1, 1)) == names_in(tmp_path / "whole")


class SavesThere(L.Callback):
    """Saves into the folder of the run, in the middle of Lightning's step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        trainer.save_checkpoint(folder / self.name.format(step=trainer.global_step))


def falling() -> Scores:
    return Scores(1.0, 2.0, 3.0)


@pytest.mark.parametrize("name", ["step-{step}.ckpt", "mine.ckpt"])
def test_a_run_never_continues_from_what_a_callback_saves_in_its_folder(tmp_path: Path, name: str):
    options: dict[str, Any] = {"callbacks": lambda: [SavesThere(name)], "monitor": "val/score"}
    _, parts = check_exact(tmp_path, falling, batches, (0, 2), (1, 1), how="SIGKILL", **options)
    assert [part.seen[0][:2] for part in parts] == [(0, 0), (0, 0), (1, 0)]
    folder = tmp_path / "parts/checkpoints"
    assert (folder / name.format(step=8)).exists()
    found = find_valid(folder)
    assert found is not None
    assert found[0].name == "last.ckpt"
    # Nor does it take one for the best, which was that of step 4.
    for own in ("best", "last-previous"):
        (folder / f"{own}.ckpt").unlink()
    fit(tmp_path / "parts", falling, max_epochs=3, **options)
    assert load(folder / "best.ckpt")["global_step"] == 12


@pytest.mark.parametrize("name", ["last", "best", "last-previous", "epoch-0001"])
def test_a_callback_cannot_replace_a_checkpoint_of_the_run(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match=rf"only the run itself writes {name}.ckpt there"):
        fit(tmp_path, callbacks=lambda: [SavesThere(f"{name}.ckpt")])


def compare_on_each_rank(folder: str) -> None:
    """The losses of a step are those of each rank, and all ranks vote on what is saved."""
    wanted = fit_with_savers(Path(folder) / "whole")
    places = [(2, "validation")]
    assert fit_with_savers(Path(folder) / "killed", *places, how="SIGKILL") == wanted


@pytest.mark.program
def test_two_ranks_agree_about_files_that_a_killed_run_has_left(tmp_path: Path):
    done = on_ranks(compare_on_each_rank, str(tmp_path))
    assert done.returncode == 0, done.stderr
