"""Steps that must not be taken: gradients that are not numbers."""

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch import distributed as dist
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from samestep.errors import RunError

log = logging.getLogger(__name__)

CHECK_EVERY = 50  # steps on a GPU between two looks at its flags


class LossError(RunError):
    """Too many steps had to be left out; the message names the step and the rank."""


class LossGuard(L.Callback):
    """Leaves out optimizer steps whose gradient is infinite or nan, before they spoil the weights.

    After its reduction the gradient of one rank is that of all, so they need not ask each other.
    On a GPU a fused optimizer reads the flag on the device, and this process looks at it every
    ``CHECK_EVERY`` steps and before each checkpoint: no step waits for the device.

    Args:
        max_skipped: steps that may be left out; one more ends the run with ``LossError``.
    """

    def __init__(self, max_skipped: int) -> None:
        self.max_skipped = max_skipped
        self.num_skipped = 0
        self._loss_is_fine: Tensor | None = None  # over the batches of this step, on this rank
        self._steps: list[tuple[int, Tensor, Tensor]] = []  # (step, gradient is bad, loss is fine)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Note whether the loss of this rank is a number."""
        fine = loss.detach().isfinite()
        self._loss_is_fine = fine if self._loss_is_fine is None else fine & self._loss_is_fine

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Leave the step out if the gradient is not a number."""
        assert self._loss_is_fine is not None
        fine, self._loss_is_fine = self._loss_is_fine, None
        if getattr(trainer.precision_plugin, "scaler", None):
            return  # 16-mixed: infinite gradients are normal, and its scaler leaves them out
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        bad = ~get_total_norm(gradients).isfinite()
        if isinstance(trainer.strategy, FSDPStrategy):  # each rank has seen a part of the gradient
            bad = trainer.strategy.reduce(bad.float(), reduce_op="max").bool()
        self._steps.append((trainer.global_step, bad, fine))
        if bad.is_cuda and optimizer.defaults.get("fused"):
            optimizer.grad_scale = None  # type: ignore[attr-defined]  # as torch's GradScaler does
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
            if len(self._steps) >= CHECK_EVERY:
                self._count(trainer)
        elif self._count(trainer):
            pl_module.zero_grad()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Look at the flags, and keep the count."""
        self._count(trainer)
        checkpoint["num_skipped"] = self.num_skipped

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take up the count."""
        self.num_skipped = checkpoint["num_skipped"]

    def _count(self, trainer: L.Trainer) -> int:
        """How many of the noted steps were left out; waits for the device."""
        steps, self._steps = self._steps, []
        if not steps or not any(torch.stack([bad for _, bad, _ in steps]).tolist()):
            return 0
        bad_steps = [(step, bool(fine)) for step, bad, fine in steps if bad]
        gathered: list[Any] = [[fine for _, fine in bad_steps]] * trainer.world_size
        if trainer.world_size > 1:
            dist.all_gather_object(gathered, gathered[0])
        for place, (step, _) in enumerate(bad_steps):
            ranks = [str(rank) for rank, fine in enumerate(gathered) if not fine[place]]
            where = f"the loss on rank {', '.join(ranks)}" if ranks else "the gradient of all ranks"
            what = f"step {step}: {where} is infinite or nan"
            self.num_skipped += 1
            if self.num_skipped > self.max_skipped:
                raise LossError(
                    f"{what}; the step was not taken, and the checkpoints are from before it. "
                    "Lower model.optimizer.lr, clip with trainer.gradient_clip_val=1.0, or leave "
                    "such steps out with callbacks.loss_guard.max_skipped=10"
                )
            if trainer.is_global_zero:
                log.warning("%s; left out, %d of %d", what, self.num_skipped, self.max_skipped)
        return len(bad_steps)
