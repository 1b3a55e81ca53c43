"""Metrics of any model for trackers and ``metrics.csv``: loss, learning rate, time, memory."""

import os
import resource
import sys
import time
from itertools import chain
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.optim import Optimizer

from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.ranks import epoch_logs, gradients, virtual
from samestep.ranks.compat import callbacks_of
from samestep.ranks.strategies import is_sharded
from samestep.run_spec import RunSpec
from samestep.tracker import ResumedTracker

SHORT_EPOCH = 8  # steps; a shorter epoch has no values between its ends


def callback(spec: RunSpec) -> L.Callback:
    """``RunStats``, which every run has."""
    return RunStats()


class RunStats(L.Callback):
    """Logs to all loggers what every training has.

    For each epoch:

    - ``time/epoch_s``: seconds of training and validation, data loading included. An epoch that was
      interrupted counts the time up to its checkpoint, without the time between the starts.
    - ``lr``: learning rate of the first parameter group at the end of the epoch.
    - ``system/cpu_cores``: CPU seconds per second of rank zero and its finished loader processes.
    - ``system/memory_gib``: peak memory of this process so far.
    - ``system/gpu_memory_gib``: peak memory of tensors on its GPU so far; CUDA only.
    - What the model logs per step, at the epoch's last step, so that a short epoch has it too.
    - The mean of what the model logs of its training per step only, such as ``train/loss_epoch``.

    And every ``log_every_n_steps`` optimizer steps, or four times in a shorter epoch:

    - ``step/loss``: loss of the last batch of the step, the mean over all its samples.
    - ``step/lr``: learning rate of the first parameter group, with which the step was taken.
    - ``step/gradient_norm``: L2 norm of the gradient before it is clipped. Not with 16-mixed, whose
      gradients are scaled.

    Only these steps synchronize with the device.
    """

    def __init__(self) -> None:
        self._lr: Any = None  # number or tensor, with which the next step is taken
        self._last_step = -1
        self._norm: torch.Tensor | None = None  # of the gradient of a step that is logged
        self._before = 0.0  # seconds of this epoch before the run was interrupted
        self._start_clocks()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks at the step from which the run resumes, and tell the trackers."""
        self._start_clocks()
        log_short_epochs(trainer)
        self._last_step = trainer.global_step
        for logger in trainer.loggers:
            if isinstance(logger, ResumedTracker):
                logger.begin(epoch_logs.num_logged_steps(trainer))

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the learning rate: the schedule replaces it at the end of the step."""
        self._lr = first_lr(trainer)
        # A schedule changes a tensor in place.
        if isinstance(self._lr, torch.Tensor):
            self._lr = self._lr.clone()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep the norm of the gradient, if the step will be logged."""
        if (trainer.global_step + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        # Another strategy may hold only a part of the gradient on each rank.
        has_all = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        if is_scaled or not (has_all or is_sharded(trainer.strategy)):
            return
        self._norm = gradients.norm_of(gradients.gradients_of(optimizer))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Log, if this was the last batch of one of the chosen steps. Every rank calls this."""
        step = trainer.global_step
        # Batches that are accumulated do not change it.
        if step == self._last_step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._last_step = step
        values: dict[str, float] = {}
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            # Lightning divides the loss by the number of batches that are accumulated.
            loss = outputs["loss"].detach().float() * trainer.accumulate_grad_batches
            # With virtual ranks it is that of all slices.
            if not virtual.layout().is_virtual:
                # A shorter slice counts less: the value is the same on any number of ranks.
                for weighting in callbacks_of(trainer, SliceWeighting):
                    loss = loss * weighting.weight()
                loss = trainer.strategy.reduce(loss, reduce_op="mean")
            values["step/loss"] = float(loss)
        if self._lr is not None:
            values["step/lr"] = to_number(self._lr)
        if self._norm is not None:
            values["step/gradient_norm"] = float(self._norm)
            self._norm = None
        # The row in which Lightning logs this batch; with manual optimization it is no step.
        log_values(trainer, values, epoch_logs.num_logged_steps(trainer))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the epoch, on rank zero, and start the clocks of the next one."""
        # Since this start only: the CPU time of an earlier process is not known.
        seconds = max(time.perf_counter() - self._start, 1e-9)
        values = {
            "time/epoch_s": self._seconds(),
            "system/cpu_cores": (cpu_seconds() - self._start_cpu) / seconds,
            "system/memory_gib": peak_memory_gib(),
        }
        if pl_module.device.type == "cuda":
            values["system/gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._before = 0.0
        self._start_clocks()
        if not trainer.is_global_zero:
            return
        lr = first_lr(trainer)
        if lr is not None:
            values["lr"] = to_number(lr)
        num_steps = epoch_logs.num_logged_steps(trainer)
        if num_steps % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            # Lightning has not logged this step, and an epoch may be shorter than its interval.
            last = epoch_logs.logged_metrics(trainer, on_step=True)["log"]
            for name, value in last.items():
                values[name] = float(value)
        log_values(trainer, values, num_steps - 1)

    def state_dict(self) -> dict[str, Any]:
        """How long the interrupted epoch has taken so far."""
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the clock of the epoch from there."""
        self._before = float(state_dict["seconds"])

    def _start_clocks(self) -> None:
        self._start = time.perf_counter()
        self._start_cpu = cpu_seconds()

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._start


def log_short_epochs(trainer: Any) -> None:
    """Log four times in each epoch that is shorter than ``log_every_n_steps``.

    Otherwise the curves of a small data set would have a point in every second epoch or so.
    """
    # Infinite for a loader without a length, whose epochs are long.
    num_steps = trainer.num_training_batches / trainer.accumulate_grad_batches
    # In an epoch of a few steps, its own values say enough.
    if SHORT_EPOCH <= num_steps < trainer.log_every_n_steps:
        trainer.log_every_n_steps = int(num_steps) // 4


def log_values(trainer: L.Trainer, values: dict[str, float], row: int) -> None:
    """Give all loggers these values of one row."""
    # Not by ``pl_module.log``, which would turn 0.01 into 0.009999999776482582.
    for logger in trainer.loggers:
        logger.log_metrics(values, step=row)
        # As Lightning does: a process that is killed then loses none of them.
        logger.save()


def first_lr(trainer: L.Trainer) -> Any:
    """The learning rate of the first parameter group, a number or a tensor; None without one."""
    # A module without an optimizer has one of Lightning's, which has no groups.
    groups = chain.from_iterable(optimizer.param_groups for optimizer in trainer.optimizers)
    return next(groups, {}).get("lr")


def cpu_seconds() -> float:
    """CPU time of this process and its finished child processes."""
    user, system, children_user, children_system, _ = os.times()
    return user + system + children_user + children_system


def peak_memory_gib() -> float:
    """Peak memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts in bytes and Linux in KiB, and nothing but the name of the system says so.
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def to_number(value: Any) -> float:
    """The shortest number that a tensor of 32 bits holds: 0.01, and not 0.009999999776482582."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
        # NumPy prints the shortest decimal that rounds to the same 32 bits.
        return float(str(value.detach().cpu().numpy()))
    return float(value)
