"""What trackers and ``metrics.csv`` get of any model: loss, learning rate and seconds."""

import time
from typing import Any

import lightning as L
import torch

from samestep.callbacks.loggers import TensorBoard
from samestep.ranks import lightning_patches


class Meter(L.Callback):
    """Logs to all loggers what every training has.

    Of each epoch:

    - ``time/epoch_s``: seconds of training and validation, data loading included. An epoch that was
      interrupted counts what its checkpoint knows of, without the time between the starts.
    - ``lr``: learning rate of the first parameter group at the end of the epoch.

    And every ``trainer.log_every_n_steps`` optimizer steps:

    - ``step/loss``: loss of the last batch of the step, the mean over all ranks.
    - ``step/lr``: learning rate of the first parameter group, with which the step was taken.

    The device is waited for at these steps only.
    """

    def __init__(self) -> None:
        self._lr: Any = None  # number or tensor, with which the next step is taken
        self._last_step = -1
        self._before = 0.0  # seconds of this epoch before the run was interrupted
        self._start = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock, at the step from which the run continues, and tell TensorBoard."""
        self._start = time.perf_counter()
        self._last_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                logger.begin(lightning_patches.num_logged_steps(trainer))

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the learning rate: the schedule puts another one there at the end of the step."""
        self._lr = lr_of(trainer)
        if isinstance(self._lr, torch.Tensor):  # of which the schedule changes the value itself
            self._lr = self._lr.clone()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Log, if this was the last batch of one of the chosen steps. Every rank calls this."""
        step = trainer.global_step
        if step == self._last_step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
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

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the epoch, on rank zero, and start the clock of the next one."""
        values = {"time/epoch_s": self._seconds()}
        self._before, self._start = 0.0, time.perf_counter()
        if not trainer.is_global_zero:
            return
        if (lr := lr_of(trainer)) is not None:
            values["lr"] = float(lr)
        # With rank_zero_only, sync_dist reduces nothing: it only keeps Lightning from warning.
        pl_module.log_dict(values, rank_zero_only=True, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """How long the interrupted epoch has taken so far."""
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._before = float(state_dict["seconds"])

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._start


def lr_of(trainer: L.Trainer) -> Any:
    """The learning rate of the first parameter group, a number or a tensor; None without one."""
    return trainer.optimizers[0].param_groups[0].get("lr") if trainer.optimizers else None
