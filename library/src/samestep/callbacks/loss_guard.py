"""Skips optimizer steps whose gradient is infinite or nan."""

import logging
import math
from itertools import compress
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.errors import RunError
from samestep.option_names import setting
from samestep.ranks import compat, environment
from samestep.ranks.process_group import gather
from samestep.ranks.sharded import norm_of, parameters_of

log = logging.getLogger(__name__)

CHECK_EVERY = 50  # steps on a GPU between two reads of its flags


class SuspectStep(NamedTuple):
    """A step whose gradient may be bad; the flags may still be on the device."""

    number: int
    is_bad: Tensor
    """Whether the gradient is infinite or nan, on all ranks the same."""
    loss_is_finite: Tensor
    """Whether the losses of this rank are finite."""


class LossGuard(L.Callback):
    """Skips optimizer steps whose gradient is infinite or nan, before they reach the weights.

    On a GPU a fused optimizer reads the flag on the device, and this process reads the flags
    every ``CHECK_EVERY`` steps and before each checkpoint: no step waits for the device.

    Args:
        max_skipped: steps that may be skipped; one more ends the run.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self.num_skipped = 0
        self._losses: list[Tensor] = []  # of all batches of this step, on this rank
        self._steps: list[SuspectStep] = []
        self._gradients: float | None = None  # their sum, since it was taken

    def take_sum_of_gradients(self) -> float | None:
        """The sum of all gradients since the last call; None where only a device knows it."""
        total, self._gradients = self._gradients, None
        return total

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Remember the loss, which tells whose data were bad if the gradient is."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Skip the step if its gradient is not finite.

        Raises:
            RunError: if too many steps were skipped.
        """
        losses, self._losses = self._losses, []
        # With 16-mixed infinite gradients are normal: its scaler skips these steps.
        if getattr(trainer.precision_plugin, "scaler", None):
            return
        gradients = gradients_of(optimizer)
        # After DDP's all-reduce all ranks hold the same gradient, so each can decide alone.
        total = sum_on_cpu(gradients)
        if total is not None:
            self._gradients = total + (self._gradients or 0.0)
            if math.isfinite(total):
                return
        bad = ~norm_of(gradients).isfinite()
        is_finite = are_losses_finite(losses, bad)
        self._steps.append(SuspectStep(trainer.global_step + 1, bad, is_finite))
        # Only a fused optimizer can skip a step by itself, and not if its weights are sharded.
        is_fused = bad.is_cuda and optimizer.defaults.get("fused")
        if is_fused and not any(isinstance(gradient, DTensor) for gradient in gradients):
            compat.skip_fused_step(optimizer, bad)
            if len(self._steps) >= CHECK_EVERY:
                self._count_skipped(trainer)
        # The optimizer skips parameters without a gradient.
        elif self._count_skipped(trainer):
            pl_module.zero_grad()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the flags, and save the count."""
        self._count_skipped(trainer)
        checkpoint["num_skipped"] = self.num_skipped

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Resume from the saved count."""
        self.num_skipped = checkpoint.get("num_skipped", 0)

    def _count_skipped(self, trainer: L.Trainer) -> int:
        """Number of the suspect steps that were skipped; waits for the device."""
        steps, self._steps = self._steps, []
        if not steps:
            return 0
        # One read for all flags. All ranks have the same ones, so all or none gather the losses.
        flags = torch.stack([step.is_bad for step in steps]).tolist()
        bad_steps = list(compress(steps, flags))
        if not bad_steps:
            return 0
        of_ranks = gather([bool(step.loss_is_finite) for step in bad_steps])
        for index, step in enumerate(bad_steps):
            guilty = []
            for rank, is_finite in enumerate(of_ranks):
                if not is_finite[index]:
                    guilty.append(str(rank))
            self._report_skipped(step.number, guilty, trainer.is_global_zero)
        return len(bad_steps)

    def _report_skipped(self, step: int, guilty: list[str], is_global_zero: bool) -> None:
        """Count a skipped step, and say which ranks had a bad loss.

        Raises:
            RunError: if too many steps were skipped.
        """
        where, remedy = "the gradient of all ranks", ""
        if guilty:
            where = f"the loss on rank {', '.join(guilty)}"
        # A mean over no token or target is nan, although the batch as a whole has some.
        if 0 < len(guilty) < environment.world_size():
            remedy = "If a slice of the batch has nothing to learn from, use samestep.mean. "
        what = f"step {step}: {where} is infinite or nan"
        self.num_skipped += 1
        if self.num_skipped > self.max_skipped:
            raise RunError(
                f"{what}; the step was not taken, and the checkpoints are from before it. {remedy}"
                f"Lower the learning rate, clip with {setting('gradient_clip_val', 1.0)}, or skip "
                f"such steps with {setting('max_skipped', 10, of='LossGuard')}"
            )
        if is_global_zero:
            log.warning("%s; skipped, %d of %d", what, self.num_skipped, self.max_skipped)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters, where they have one."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def sum_on_cpu(gradients: list[Tensor]) -> float | None:
    """The sum of all values; None if a device or other ranks would have to answer.

    A sum with an infinite or nan value in it is never finite. It takes a fifth of the time of
    ``get_total_norm``, which makes more small tensors.
    """
    total = 0.0
    for gradient in gradients:
        if not gradient.is_cpu or isinstance(gradient, DTensor):
            return None
        total += gradient.sum().item()
    return total


def are_losses_finite(losses: list[Tensor], bad: Tensor) -> Tensor:
    """Whether all losses are finite, as a flag on the device; without losses ``not bad``."""
    # Manual optimization without Lightning's manual_backward tells no loss.
    if not losses:
        return ~bad
    flags = [loss.isfinite().all() for loss in losses]
    return torch.stack(flags).all()
