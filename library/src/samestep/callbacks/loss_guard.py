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

from samestep.callbacks.run_state import Part, Saved
from samestep.errors import RunError
from samestep.option_names import setting
from samestep.ranks import devices, environment, gradients, virtual
from samestep.ranks.process_group import gather

log = logging.getLogger(__name__)

CHECK_EVERY = 50  # steps on a GPU between two reads of its flags


class SuspectStep(NamedTuple):
    """A step whose gradient may be bad."""

    number: int
    losses: list[float | Tensor]
    """Of this rank, which may still be on the device."""


class LossGuard(Part):
    """Skips optimizer steps whose gradient is infinite or nan, before they reach the weights.

    On a GPU a fused optimizer reads the flag on the device, and this process reads the flags
    every ``CHECK_EVERY`` steps and before each checkpoint: no step waits for the device.
    ``Receipts`` and clipping use what this callback has computed.

    Args:
        max_skipped: steps that may be skipped; one more ends the run.
    """

    key = "num_skipped"

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self.num_skipped = 0
        self._losses: list[float | Tensor] = []  # of all batches of this step, on this rank
        self._steps: list[SuspectStep] = []
        self._flags: Tensor | None = None  # one for each of these steps: 1 if its gradient is bad
        self._gradients: float | None = None  # their sum, since it was taken
        self._loss: float | Tensor | None = None  # the same for the losses
        self.has_receipts = False
        """Whether this rank has ``Receipts``, which takes the loss and the gradients."""

    def take_loss(self) -> float | Tensor | None:
        """The sum of the losses since the last call; None if there was none."""
        loss, self._loss = self._loss, None
        return loss

    def take_sum_of_gradients(self) -> float | None:
        """The sum of all gradients since the last call; None where only a device knows it."""
        total, self._gradients = self._gradients, None
        return total

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Remember the loss, which tells whose data were bad if the gradient is.

        There may be several, of several optimizers or evaluations of one.
        """
        gradients.forget_norms()
        # Read now: a module may change its loss in place.
        value = read_loss(loss)
        self._losses.append(value)
        # They are of the first slice, which rank zero has on any number of ranks.
        if self.has_receipts and virtual.current() == 0:
            self._loss = value if self._loss is None else self._loss + value

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
        found = gradients.gradients_of(optimizer)
        # After DDP's all-reduce all ranks hold the same gradient, so each can decide alone.
        total = sum_on_cpu(found)
        if total is not None:
            self._gradients = total + (self._gradients or 0.0)
            if math.isfinite(total):
                return
        flag = self._next_flag(found[0].device)
        gradients.mark_if_not_finite(found, flag)
        self._steps.append(SuspectStep(trainer.global_step + 1, losses))
        # Only a fused optimizer can skip a step by itself, and not if its weights are sharded.
        is_fused = devices.is_on_gpu(flag) and optimizer.defaults.get("fused")
        if is_fused and not any(map(gradients.is_sharded, found)):
            gradients.skip_fused_step(optimizer, flag)
            if len(self._steps) >= CHECK_EVERY:
                self._count_skipped(trainer)
        # The optimizer skips parameters without a gradient.
        elif self._count_skipped(trainer):
            pl_module.zero_grad()
        if not pl_module.automatic_optimization:
            # Its backward pass may go past our hook.
            gradients.forget_norms()

    def _next_flag(self, device: torch.device) -> Tensor:
        """A 0 on the device, for the next step. All flags are allocated, and read, at once."""
        if self._flags is None:
            self._flags = torch.zeros(CHECK_EVERY, device=device)
        return self._flags[len(self._steps)]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the memory of the last gradients go."""
        gradients.forget_norms()

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> int:
        """Read the flags, and keep the count."""
        self._count_skipped(trainer)
        return self.num_skipped

    def load(self, trainer: L.Trainer, checkpoint: dict[str, Any], saved: Saved) -> None:
        """Go on with the saved count."""
        self.num_skipped = saved.own

    def _count_skipped(self, trainer: L.Trainer) -> int:
        """Number of the suspect steps that were skipped; waits for the device."""
        steps, self._steps = self._steps, []
        flags, self._flags = self._flags, None
        if flags is None:
            return 0
        # One read for all flags. All ranks have the same ones, so all or none gather the losses.
        bad_steps = list(compress(steps, flags.tolist()))
        if not bad_steps:
            return 0
        of_ranks = gather([are_finite(step.losses) for step in bad_steps])
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


def read_loss(loss: Tensor) -> float | Tensor:
    """The value of a loss: a number, or on a device a copy, for which nothing waits."""
    if isinstance(loss, DTensor):
        # To read all of it, the other ranks would have to take part.
        loss = loss.to_local()
    if devices.is_at_hand(loss):
        return loss.item() if loss.ndim == 0 else loss.sum().item()
    # Some other devices have no 64 bits.
    return loss.detach().sum(dtype=torch.float64 if devices.is_on_gpu(loss) else None)


def sum_on_cpu(found: list[Tensor]) -> float | None:
    """The sum of all values; None if a device or other ranks would have to answer.

    A sum with an infinite or nan value in it is never finite. It takes a fifth of the time of
    ``get_total_norm``, which makes more small tensors.
    """
    total = 0.0
    for gradient in found:
        if not devices.is_at_hand(gradient) or gradients.is_sharded(gradient):
            return None
        total += gradient.sum().item()
    return total


def are_finite(losses: list[float | Tensor]) -> bool:
    """Whether all losses of a bad step are finite; waits for the device."""
    # Manual optimization without Lightning's manual_backward tells no loss, so it may be the cause.
    return bool(losses) and all(map(math.isfinite, losses))
