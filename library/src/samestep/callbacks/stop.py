"""Between two steps: all ranks save or stop together."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from samestep.callbacks.last_checkpoint import LastCheckpoint
from samestep.ranks import lightning_patches, stopping


class StopBetweenSteps(L.Callback):
    """Stops all ranks before the next step when one of them got a signal.

    It is the first callback, so that no other one has begun a step that is not taken. Validation
    runs to its end: the checkpoint then holds all of it.

    Args:
        last: saves now and then within an epoch, and when the run stops; None saves nothing.
    """

    def __init__(self, last: LastCheckpoint | None) -> None:
        self.last = last
        # Whether no gradients are accumulated, so that the ranks ask each other before the next
        # batch. A wait for this batch may be interrupted then, and only then.
        self._asks_before_batch = True
        self._is_first_batch = True  # of this process

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defer signals from here on, and begin where the checkpoint was saved."""
        # The first callback does it: the others ask for the epoch.
        lightning_patches.continue_as_undisturbed(trainer)
        stopping.defer()
        self._is_first_batch = True
        # A checkpoint is saved between two optimizer steps, so a run continues between two too.
        self._set_asking(True)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Allow a stop: an optimizer step never reaches from one epoch into the next."""
        self._set_asking(True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save or stop, if any rank wishes to; within an optimizer step do nothing."""
        if self._is_first_batch:
            self._is_first_batch = False
            # Lightning calls `on_train_epoch_start` of no callback when it continues an epoch.
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, GradientAccumulationScheduler):
                    callback.on_train_epoch_start(trainer)
        if not self._asks_before_batch:
            return
        if self.last is None:
            stopping.check()
        else:
            self.last.between_steps(trainer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Find out whether the next batch begins an optimizer step."""
        self._set_asking((batch_idx + 1) % trainer.accumulate_grad_batches == 0)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let validation run to its end."""
        stopping.allow_interruption(False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a wait for training data be interrupted as before."""
        stopping.allow_interruption(self._asks_before_batch)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a wait for test data be interrupted."""
        stopping.allow_interruption(True)

    def on_test_batch_start(self, *args: Any) -> None:
        """Stop if any rank was told to; the next attempt tests again."""
        stopping.check()

    def _set_asking(self, asks: bool) -> None:
        self._asks_before_batch = asks
        stopping.allow_interruption(asks)
