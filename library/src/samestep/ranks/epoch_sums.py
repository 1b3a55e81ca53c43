"""What a part of a model adds up over an epoch, on each rank for itself."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class EpochSums(nn.Module):
    """Sums of one rank, which a checkpoint within an epoch keeps; ``EpochMean`` has some.

    On the same number of ranks each gets its own sums back, and otherwise rank zero those of all.
    """

    def state(self) -> Tensor:
        """The sums of this rank so far, which can be added to those of other ranks."""
        raise NotImplementedError

    def load_state(self, totals: Tensor) -> None:
        """Continue from what ``state`` returned."""
        raise NotImplementedError


def has_counted(metric: Metric) -> bool:
    """Whether a metric of torchmetrics 1.9 has counted anything since it was made or reset."""
    if metric.update_called:
        return True
    # A wrapper, such as Running, may call the update of the metric in it instead of its own.
    for name, default in metric._defaults.items():
        state: Any = getattr(metric, name)
        is_list = isinstance(state, list)
        has_changed = bool(state) if is_list else not torch.equal(state.cpu(), default.cpu())  # type: ignore[union-attr]
        if has_changed:
            return True
    return False


def counts_of(metric: Metric) -> set[str]:
    """The names of the attributes in which a metric of torchmetrics 1.9 counts."""
    return {*metric.metric_state, "_update_count", "_computed"}
