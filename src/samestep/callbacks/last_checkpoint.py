"""When the last checkpoint is written: each epoch, every so often, and when told to stop."""

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from samestep.callbacks.best_checkpoint import BestCheckpoint
from samestep.callbacks.epoch_checkpoints import EpochCheckpoints
from samestep.ranks import lightning_patches, stopping
from samestep.ranks.stopping import Stopped
from samestep.run.checkpoint import AtomicCheckpointIO


class LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt``, from which the same command continues as if nothing had happened.

    Saves at the end of each epoch, every ``every_s`` seconds within one, and when told to stop by
    SIGTERM or SIGINT; then all ranks stop together. Within an epoch it acts only where
    ``between_steps`` is called: before the first batch of an optimizer step.

    Args:
        dirpath: directory of the checkpoints.
        every_s: seconds after which an interrupted epoch has been saved.
    """

    def __init__(self, dirpath: str, every_s: float) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_s = every_s
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._has_ended = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Tell the reader of checkpoints which shapes to expect."""
        checkpoint_io = trainer.strategy.checkpoint_io
        if stage == "fit" and isinstance(checkpoint_io, AtomicCheckpointIO):
            weights = pl_module.state_dict() if pl_module.strict_loading else {}
            checkpoint_io.shapes = {
                name: value.shape for name, value in weights.items() if isinstance(value, Tensor)
            }

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defer signals from here on; end at once if early stopping had ended this run before."""
        stopping.defer()
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        trainer.should_stop = trainer.should_stop or self._has_ended
        lightning_patches.uncount_step_before_validation(trainer)

    def between_steps(self, trainer: L.Trainer) -> None:
        """Save or stop if any rank wishes to; every rank calls this before each step."""
        due = trainer.is_global_zero and time.monotonic() - self._saved_at > self.every_s
        wish = stopping.agreed(1 if due and trainer.training else 0)
        if wish > 1:  # no signal to stop has the number 1
            raise Stopped(wish)
        if wish:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, after early stopping has had its turn; then keep it under its other names."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        keepers = [c for c in callbacks if isinstance(c, (BestCheckpoint, EpochCheckpoints))]
        for callback in keepers:
            callback.update(trainer)
        self._save(trainer)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        for callback in keepers:
            callback.link(trainer, self.path)
        # All ranks wait, whether the epoch was the best one or not: the test that comes after the
        # last epoch looks for best.ckpt on each of them.
        trainer.strategy.barrier()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save when all ranks have agreed to stop.

        Any other exception may be on one rank only, and saving needs all of them.
        """
        if not isinstance(exception, Stopped):
            return
        if trainer.training and trainer.global_step > self._saved_step:
            self._save(trainer)
        if trainer.is_global_zero:
            print(f"Stopped by {exception.name} after step {trainer.global_step}; saved.")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep whether early stopping has ended the run, which Lightning forgets."""
        checkpoint["has_ended"] = trainer.should_stop

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember it."""
        self._has_ended = checkpoint.get("has_ended", False)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with lightning_patches.between_steps(trainer):
            trainer.save_checkpoint(self.path)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
