"""What could not resume, or would be wrong without anybody noticing, is rejected."""

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from library.tests.kit import Net, Scores, batches, fit, on_ranks
from library.tests.programs import run_code
from samestep import Trainer
from samestep.callbacks.checkpoints import Checkpoints
from samestep.errors import ConfigError
from samestep.plugins import checks
from samestep.plugins.checks import UNSUPPORTED, Checks, UnequalWeightsError, check_supported
from samestep.ranks.devices import sum_of_bits
from samestep.run.checkpoint import load


class FindsAtSomeEpochs(LearningRateFinder):
    """As in Lightning's documentation: a child is not supported either."""


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (FindsAtSomeEpochs(), "set it in the configuration of the model"),
        (BatchSizeFinder(), "set it in the configuration of the data"),
        (StochasticWeightAveraging(swa_lrs=0.1), "use .*EMAWeightAveraging"),
        (ModelPruning("l1_unstructured"), "prune the weights of a finished run"),
        (OnExceptionCheckpoint("."), "Checkpoints saves"),
        (SpikeDetection(), "LossGuard watches"),
    ],
    ids=[kind.__name__ for kind in UNSUPPORTED],
)
def test_callbacks_that_cannot_continue_are_rejected(callback: L.Callback, remedy: str):
    with pytest.raises(ConfigError, match=f"callbacks.mine: .*is not supported: .*{remedy}"):
        check_supported(callback, "callbacks.mine")


def test_callbacks_of_the_module_are_rejected_before_the_first_step(tmp_path: Path):
    class Brings(Net):
        def configure_callbacks(self):
            return [OnExceptionCheckpoint(tmp_path / "own")]

    with pytest.raises(ConfigError, match=r"Brings\.configure_callbacks: OnExceptionCheckpoint is"):
        fit(tmp_path / "run", Brings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", [None, "highest"])
def test_a_monitor_needs_a_mode(tmp_path: Path, mode: str | None):
    said = (
        f"monitor=val_acc: mode={mode} must be min or max: choose mode=max if a higher val_acc is "
        "better, mode=min if a lower one is"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        Trainer(run_dir=tmp_path / "run", monitor="val_acc", mode=mode)
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        Checkpoints(str(tmp_path / "run/checkpoints"), monitor="val_acc", mode=mode)
    assert not (tmp_path / "run").exists()


def scores() -> Scores:
    return Scores(1.0)


NOTE = "so the last weights are tested"


def test_without_a_monitor_the_last_weights_are_the_best(tmp_path: Path, capsys):
    for epochs in (1, 2):
        (part,) = fit(tmp_path, scores, max_epochs=epochs)
        assert isinstance(part.trainer, Trainer)
        assert NOTE not in capsys.readouterr().out  # the script has said so: monitor=None
    part.trainer.test(part.module, batches(shuffle=False), verbose=False)
    assert Path(part.trainer.ckpt_path).name == "last.ckpt"
    assert load(tmp_path / "checkpoints/last.ckpt")["global_step"] == 8


@pytest.mark.parametrize(
    ("options", "is_said"),
    [({"limit_val_batches": 0}, True), ({"check_val_every_n_epoch": 4}, True),
     ({"check_val_every_n_epoch": 2}, False)],
)  # fmt: skip
def test_a_run_that_never_validates_says_so(tmp_path: Path, capsys, options, is_said: bool):
    fit(tmp_path, scores, monitor="val/score", **options)
    said = capsys.readouterr().out
    assert (f"never validates, and nothing logs val/score, {NOTE}" in said) is is_said
    assert (NOTE in said) is is_said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_sum_of_the_bits_differs_by_the_last_bit(dtype: torch.dtype):
    tensor = torch.ones(3, 2, dtype=dtype).t()
    other = tensor.clone()
    torch.view_as_real(other)[0, 0, 0].add_(1e-6) if dtype.is_complex else other[0, 0].add_(0.01)
    assert sum_of_bits(tensor) == sum_of_bits(tensor.clone()) != sum_of_bits(other)
    assert sum_of_bits(tensor * float("nan")) == sum_of_bits(tensor * float("nan"))


@pytest.mark.parametrize("step", [0, 1])
def test_different_weights_of_ranks_end_the_run(monkeypatch: pytest.MonkeyPatch, step: int):
    monkeypatch.setattr(checks, "gather", lambda own: [own, [own[0], own[1] + step]])
    trainer: Any = SimpleNamespace(world_size=2, strategy=DDPStrategy(), global_step=12)
    model: Any = torch.nn.Linear(2, 1)
    if step == 0:
        return Checks().on_save_checkpoint(trainer, model, {})
    with pytest.raises(UnequalWeightsError, match=r"different weights before step 12 .*: bias\."):
        Checks().on_save_checkpoint(trainer, model, {})
    return None


def chosen_anew() -> DataLoader:
    """As by a ``random_split`` before the Trainer is built: nothing has seeded it."""
    samples = TensorDataset(torch.arange(40.0)[:, None])
    return DataLoader(Subset(samples, random.SystemRandom().sample(range(40), 16)), 4)


def test_a_subset_that_is_chosen_again_is_announced(tmp_path: Path, capsys):
    fit(tmp_path / "anew", Net, chosen_anew, [(0, 1)])
    said = capsys.readouterr().out
    assert said.count("the training data are other samples than before the interruption") == 1

    def chosen_once() -> DataLoader:
        # The kit builds the Trainer first, which seeds it.
        kept, _ = random_split(TensorDataset(torch.arange(20.0)[:, None]), [16, 4])
        return DataLoader(kept, 4)

    fit(tmp_path / "once", Net, chosen_once, [(0, 1)])
    assert "other samples" not in capsys.readouterr().out


def choose_on_ranks(folder: str) -> None:
    fit(Path(folder), Net, chosen_anew)


@pytest.mark.program
def test_ranks_that_choose_different_samples_are_rejected(tmp_path: Path):
    done = on_ranks(choose_on_ranks, str(tmp_path / "run"))
    assert done.returncode == 2, done.stderr
    assert "the ranks have chosen different samples" in done.stderr
    assert "Traceback" not in done.stderr


REFUSED = """
import lightning.pytorch.callbacks as callbacks
from samestep import Trainer
Trainer(run_dir="mine", callbacks=[callbacks.StochasticWeightAveraging(0.1)])
"""


@pytest.mark.program
def test_a_script_with_such_a_callback_gets_one_message():
    done = run_code(REFUSED)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: callbacks: StochasticWeightAveraging is not supported")
    assert done.stderr.count("\n") == 1
