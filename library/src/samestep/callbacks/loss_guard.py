"""Skips optimizer steps whose gradient is infinite or nan."""

import logging
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from samestep.errors import RunError
from samestep.option_names import setting
from samestep.ranks import compat
from samestep.ranks.process_group import gather
from samestep.ranks.sharded import norm_of, parameters_of

log = logging.getLogger(__name__)

CHECK_EVERY = 50  # steps on a GPU between two looks at its flags


class LossGuard(L.Callback):
    """Skips optimizer steps whose gradient is infinite or nan, before they reach the weights.

    On a GPU a fused optimizer reads the flag on the device, and this process looks at the flags
    every ``CHECK_EVERY`` steps and before each checkpoint: no step waits for the device.

    Args:
        max_skipped: steps that may be skipped; one more ends the run.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self.num_skipped = 0
        self._losses: list[Tensor] = []  # of all batches of this step, on this rank
        self._steps: list[tuple[int, Tensor, Tensor]] = []  # (step, gradient is bad, loss is fine)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Remember the loss, which is looked at if the gradient is bad."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Skip the step if its gradient is not finite."""
        losses, self._losses = self._losses, []
        if getattr(trainer.precision_plugin, "scaler", None):
            return  # with 16-mixed infinite gradients are normal: its scaler skips these steps
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        # After DDP's all-reduce all ranks hold the same gradient, so each can decide alone.
        if are_finite(gradients):
            return
        is_sharded = any(isinstance(gradient, DTensor) for gradient in gradients)
        bad = ~norm_of(gradients).isfinite()
        # Without a loss: manual optimization without Lightning's manual_backward.
        loss_is_finite = ~bad
        if losses:
            loss_is_finite = torch.stack([loss.isfinite().all() for loss in losses]).all()
        self._steps.append((trainer.global_step + 1, bad, loss_is_finite))

        if bad.is_cuda and not is_sharded and optimizer.defaults.get("fused"):
            compat.skip_fused_step(optimizer, bad)
            if len(self._steps) >= CHECK_EVERY:
                self._count_skipped(trainer)
        elif self._count_skipped(trainer):
            pl_module.zero_grad()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Look at the flags, and save the count."""
        self._count_skipped(trainer)
        checkpoint["num_skipped"] = self.num_skipped

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on with the saved count."""
        self.num_skipped = checkpoint.get("num_skipped", 0)

    def _count_skipped(self, trainer: L.Trainer) -> int:
        """Number of the remembered steps that were skipped; waits for the device."""
        steps, self._steps = self._steps, []
        if not steps or not any(torch.stack([bad for _, bad, _ in steps]).tolist()):
            return 0
        bad_steps = [(step, bool(fine)) for step, bad, fine in steps if bad]
        of_ranks = gather([fine for _, fine in bad_steps])
        for index, (step, _) in enumerate(bad_steps):
            ranks = [str(rank) for rank, fine in enumerate(of_ranks) if not fine[index]]
            where = f"the loss on rank {', '.join(ranks)}" if ranks else "the gradient of all ranks"
            what = f"step {step}: {where} is infinite or nan"
            self.num_skipped += 1
            if self.num_skipped > self.max_skipped:
                raise RunError(
                    f"{what}; the step was not taken, and the checkpoints are from before it. "
                    f"Lower the learning rate, clip with {setting('gradient_clip_val', 1.0)}, or "
                    f"skip such steps with {setting('max_skipped', 10)}"
                )
            if trainer.is_global_zero:
                log.warning("%s; skipped, %d of %d", what, self.num_skipped, self.max_skipped)
        return len(bad_steps)


def are_finite(gradients: list[Tensor]) -> bool:
    """Whether every value is finite; False if a device or other ranks would have to be asked.

    A sum with an infinite or nan value in it is never finite. It takes a fifth of the time of
    ``get_total_norm``, which makes more small tensors.
    """
    return all(
        gradient.is_cpu
        and not isinstance(gradient, DTensor)
        and math.isfinite(gradient.sum().item())
        for gradient in gradients
    )
