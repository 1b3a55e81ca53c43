"""Between two steps: all ranks save or stop together."""

from typing import Any

import lightning as L

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

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defer signals from here on, and begin where the checkpoint was saved."""
        # The first callback does it: the others ask for the epoch.
        lightning_patches.continue_as_undisturbed(trainer)
        stopping.defer()
        stopping.allow_interruption(True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save or stop, if any rank wishes to; within an optimizer step do nothing."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if self.last is None:
            stopping.check()
        else:
            self.last.between_steps(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let validation run to its end."""
        stopping.allow_interruption(False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a wait for training data be interrupted again."""
        stopping.allow_interruption(True)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a wait for test data be interrupted."""
        stopping.allow_interruption(True)

    def on_test_batch_start(self, *args: Any) -> None:
        """Stop if any rank was told to; the next attempt tests again."""
        stopping.check()
