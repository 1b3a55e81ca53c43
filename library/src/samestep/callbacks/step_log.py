"""What trackers and ``metrics.csv`` get within an epoch: loss and learning rate of some steps."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger

from samestep.callbacks.loggers import WandbRun
from samestep.ranks import lightning_patches


class StepLog(L.Callback):
    """Logs every ``trainer.log_every_n_steps`` optimizer steps, to all loggers.

    - ``step/loss``: loss of the last batch of the step, the mean over all ranks.
    - ``step/lr``: learning rate of the first parameter group, with which the step was taken.

    The device is waited for at these steps only. With ``logger.wandb.watch`` W&B also gets a
    histogram of the gradients of each parameter, as often.
    """

    def __init__(self) -> None:
        self._group: dict[str, Any] = {}  # the first one of the optimizer's parameters
        self._lr: Any = None  # number or tensor, with which the next step is taken
        self._last_step = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let W&B watch the gradients, if it should."""
        for logger in watching(trainer):
            logger.watch(pl_module, log="gradients", log_freq=interval_of(trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin at the step from which the run continues."""
        self._last_step = trainer.global_step
        self._group = trainer.optimizers[0].param_groups[0] if trainer.optimizers else {}

    def on_train_batch_start(self, *args: Any) -> None:
        """Keep the learning rate: the schedule puts another one there at the end of the step."""
        self._lr = self._group.get("lr")
        if isinstance(self._lr, torch.Tensor):  # of which the schedule changes the value itself
            self._lr = self._lr.clone()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Log, if this was the last batch of one of the chosen steps. Every rank calls this."""
        step = trainer.global_step
        if step == self._last_step or step % interval_of(trainer):
            return
        self._last_step = step
        values: dict[str, float] = {}
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            # Lightning divides the loss by the number of batches that are accumulated.
            loss = outputs["loss"].detach().float() * trainer.accumulate_grad_batches
            values["step/loss"] = float(trainer.strategy.reduce(loss, reduce_op="mean"))
        if self._lr is not None:
            values["step/lr"] = float(self._lr)
        # The row of this batch, in which Lightning logs too.
        row = lightning_patches.num_logged_steps(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=row)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The test has no gradients."""
        for logger in watching(trainer):
            logger.experiment.unwatch(pl_module)


def interval_of(trainer: L.Trainer) -> int:
    """Steps between two values, at least 1."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return interval


def watching(trainer: L.Trainer) -> list[WandbLogger]:
    """The loggers of W&B that get the gradients; on rank zero only."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbRun) and logger.watches]
