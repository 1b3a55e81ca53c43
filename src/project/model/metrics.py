"""Loss and accuracy of one epoch, exact on any number of ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]
"""Adds a tensor up over all ranks."""


class Sums:
    """Sums over the images of one epoch, kept on the device and read once at its end.

    Sums, unlike means, add up over batches and ranks of unequal size, so the epoch's figures are
    exact whatever the split. Nothing is synchronized with the device or between ranks before
    ``metrics``.
    """

    def __init__(self) -> None:
        self._totals: Tensor | None = None  # [loss, images right, images right within 5, images]

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add one batch.

        Args:
            loss: mean cross entropy of the batch, a scalar.
            logits: ``[B, num_classes]``.
            labels: int64 ``[B]``.
        """
        with torch.no_grad():
            right = (logits.argmax(1) == labels).sum()
            right5 = right
            if logits.shape[1] > 10:
                right5 = (logits.topk(5).indices == labels[:, None]).any(1).sum()
            count = torch.full_like(right, len(labels))
            batch = torch.stack([loss.detach() * len(labels), right, right5, count])
            # float64 keeps every count exact; Apple's GPUs do not have it.
            batch = batch.to(torch.float32 if batch.device.type == "mps" else torch.float64)
            self._totals = batch if self._totals is None else self._totals.add_(batch)

    def accuracy(self) -> float:
        """Accuracy so far on this rank; waits for the device."""
        if self._totals is None:
            return 0.0
        return float(self._totals[1] / self._totals[3])

    def state(self, device: torch.device) -> Tensor:
        """The sums of this rank so far, ``[4]``."""
        kind = torch.float32 if device.type == "mps" else torch.float64
        return torch.zeros(4, dtype=kind, device=device) if self._totals is None else self._totals

    def load_state(self, totals: Tensor) -> None:
        """Go on from what ``state`` gave."""
        self._totals = totals.clone()

    def metrics(self, device: torch.device, add_up: Sum, *, top5: bool) -> dict[str, Tensor]:
        """Loss, accuracy and, on demand, top-5 accuracy over all ranks, and begin a new epoch.

        Every rank must call this, also one that saw no image.
        """
        loss, right, right5, count = add_up(self.state(device))
        self._totals = None
        metrics = {"loss": loss / count, "accuracy": right / count}
        if top5:
            metrics["top5_accuracy"] = right5 / count
        return {name: value.float() for name, value in metrics.items()}
