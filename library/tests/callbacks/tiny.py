"""A model that learns nothing, for tests of what happens around it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from library.tests.kit import Killed, LeavesData, LeavesObjects
from samestep import loops
from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.hparams_on_resume import HparamsOnResume
from samestep.callbacks.run_state import RunState
from samestep.ranks import compat, stopping
from samestep.run.checkpoint import AtomicCheckpointIO

STEPS_PER_EPOCH = 4


class Tiny(L.LightningModule):
    """Logs the given scores as ``val/score``, one for each validation."""

    def __init__(self, scores: list[float] = [], schedule: Any = None) -> None:  # noqa: B006
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
        self.scores = scores
        self.schedule = schedule
        self.lrs: dict[int, float] = {}

    def training_step(self, batch, batch_idx):
        self.lrs[self.global_step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def test_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        if self.scores:
            self.log("val/score", self.scores[min(self.current_epoch, len(self.scores) - 1)])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        plateau = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
        interval = {"interval": "epoch", "monitor": "val/score"} if plateau else {}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", **interval},
        }


def fit(
    run_dir: Path,
    model: Tiny,
    *callbacks: L.Callback,
    max_epochs: int = 3,
    ckpt: str | None = None,
    mode: str = "max",
    every_s: float = 300,
    every_n_epochs: int | None = None,
    monitor: str | None = "val/score",
    **options: Any,
) -> L.Trainer:
    """Train in the run directory, and continue from one of its checkpoints."""
    # All samples are equal: no callback here lets an epoch continue with the next batch.
    batches = DataLoader(torch.ones(8, 2), batch_size=2)
    folder = run_dir / "checkpoints"
    checkpoints = Checkpoints(str(folder), every_s, monitor, mode, every_n_epochs)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=max_epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=run_dir, plugins=[AtomicCheckpointIO()],
        callbacks=[
            LeavesData(), LeavesObjects(), HparamsOnResume(), checkpoints, *callbacks, RunState(),
        ],
        **options,
    )  # fmt: skip
    compat.apply(trainer)
    loops.install(trainer)
    # A real signal ends the test. One of `signal_came` is forgotten afterwards.
    with (
        mock.patch("samestep.ranks.stopping.defer"),
        mock.patch.object(stopping._State, "signum", 0),
    ):
        trainer.fit(model, batches, batches, ckpt_path=folder / ckpt if ckpt else None)
    return trainer


def signal_came() -> None:
    """Let this process have got SIGTERM, without the handler that a run installs."""
    stopping._State.signum = signal.SIGTERM


@contextmanager
def killed_before_the_link() -> Iterator[None]:
    """Within this block a run ends when it has saved its second epoch, and not yet linked."""
    commit = Checkpoints._commit

    def commit_or_die(checkpoints: Checkpoints, trainer: L.Trainer) -> None:
        if checkpoints._due and checkpoints._saved_batches == 2 * STEPS_PER_EPOCH:
            checkpoints._checkpoint_io.wait()
            checkpoints._due = None
            raise Killed
        commit(checkpoints, trainer)

    with mock.patch.object(Checkpoints, "_commit", commit_or_die), pytest.raises(Killed):
        yield
