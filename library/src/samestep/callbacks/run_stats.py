"""What trackers and ``metrics.csv`` get of any model: loss, learning rate, seconds and memory."""

import os
import resource
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim import Optimizer

from samestep.loggers import TensorBoard
from samestep.ranks import epoch_logs
from samestep.ranks.sharded import ShardedStrategy, norm_of, parameters_of


class RunStats(L.Callback):
    """Logs to all loggers what every training has.

    Of each epoch:

    - ``time/epoch_s``: seconds of training and validation, data loading included. An epoch that was
      interrupted counts what its checkpoint knows of, without the time between the starts.
    - ``lr``: learning rate of the first parameter group at the end of the epoch.
    - ``system/cpu_cores``: processor seconds per second of rank zero's process and of its data
      workers that have ended.
    - ``system/memory_gib``: the most memory that this process has used so far.
    - ``system/gpu_memory_gib``: the most memory of its GPU that tensors have used so far.
    - What the model logs per step, of the epoch's last step, so that a short epoch has it too.

    And every ``log_every_n_steps`` optimizer steps:

    - ``step/loss``: loss of the last batch of the step, the mean over all ranks.
    - ``step/lr``: learning rate of the first parameter group, with which the step was taken.
    - ``step/gradient_norm``: L2 norm of the gradient before it is clipped. Not with 16-mixed, whose
      gradients are scaled.

    The device is waited for at these steps only.
    """

    def __init__(self) -> None:
        self._lr: Any = None  # number or tensor, with which the next step is taken
        self._last_step = -1
        self._norm: torch.Tensor | None = None  # of the gradient of a step that is logged
        self._before = 0.0  # seconds of this epoch before the run was interrupted
        self._start_clocks()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks at the step from which the run continues, and tell TensorBoard."""
        self._start_clocks()
        self._last_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoard):
                logger.begin(epoch_logs.num_logged_steps(trainer))

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the learning rate: the schedule puts another one there at the end of the step."""
        self._lr = lr_of(trainer)
        if isinstance(self._lr, torch.Tensor):  # of which the schedule changes the value itself
            self._lr = self._lr.clone()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep the norm of the gradient, if the step will be logged."""
        if (trainer.global_step + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        has_all = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy | ShardedStrategy)
        if is_scaled or not has_all:
            return
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        self._norm = norm_of([gradient for gradient in gradients if not gradient.is_sparse])

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
            values["step/lr"] = to_number(self._lr)
        if self._norm is not None:
            values["step/gradient_norm"] = float(self._norm)
            self._norm = None
        # The row of this batch, in which Lightning logs too.
        row = epoch_logs.num_logged_steps(trainer)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=row)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the epoch, on rank zero, and start the clocks of the next one."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        values = {
            "time/epoch_s": self._seconds(),
            "system/cpu_cores": (sum(os.times()[:4]) - self._start_cpu) / seconds,
            # Linux counts in KiB.
            "system/memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        if pl_module.device.type == "cuda":
            values["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._before = 0.0
        self._start_clocks()
        if not trainer.is_global_zero:
            return
        if (lr := lr_of(trainer)) is not None:
            values["lr"] = to_number(lr)
        num_steps = epoch_logs.num_logged_steps(trainer)
        if num_steps % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            # Lightning has not logged this step, and an epoch may be shorter than its interval.
            last = epoch_logs.logged_metrics(trainer, on_step=True)["log"]
            values |= {name: float(value) for name, value in last.items()}
        # Not by the module: Lightning would make 0.009999999776482582 of a learning rate of 0.01.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=num_steps - 1)

    def state_dict(self) -> dict[str, Any]:
        """How long the interrupted epoch has taken so far."""
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self._before = float(state_dict["seconds"])

    def _start_clocks(self) -> None:
        self._start, self._start_cpu = time.perf_counter(), sum(os.times()[:4])

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._start


def lr_of(trainer: L.Trainer) -> Any:
    """The learning rate of the first parameter group, a number or a tensor; None without one."""
    return trainer.optimizers[0].param_groups[0].get("lr") if trainer.optimizers else None


def to_number(value: Any) -> float:
    """The shortest number that a tensor of 32 bits holds: 0.01, and not 0.009999999776482582."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
        return float(str(value.detach().cpu().numpy()))
    return float(value)
