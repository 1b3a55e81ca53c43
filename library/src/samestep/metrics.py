"""Metrics of one epoch that are exact on any number of ranks, before and after an interruption."""

from typing import Any

import torch
from torch import Tensor, nn

from samestep.ranks import collectives


class EpochMean(nn.Module):
    """Means of one epoch over all samples and ranks, kept on the device and read at its end.

    It adds up sums and the number of samples. Sums, unlike means, stay exact over batches and
    ranks of unequal size. Nothing is synchronized with the device or between ranks before
    ``means``. A checkpoint within an epoch keeps what was added so far.

    ``self.log(..., on_epoch=True)`` gives the same means, but costs more time in each step.

    Args:
        stage: prefix of the metrics: train, val or test.
        names: the metrics, such as ``"loss"``.

    Example:
        In a LightningModule::

            self.train_metrics = EpochMean("train", "loss")  # in __init__
            self.train_metrics.update(len(x), loss=loss * len(x))  # in training_step
            self.log_dict(self.train_metrics.means(), sync_dist=True)  # in on_train_epoch_end
    """

    device_of: Tensor

    def __init__(self, stage: str, *names: str) -> None:
        super().__init__()
        self.stage = stage
        self.names = names
        # One for each name, and the number of samples last. On the CPU these are Python numbers,
        # because adding small tensors there takes longer.
        self._totals: list[Any] = [0] * (len(names) + 1)
        # Empty; it follows the model to its device, also on a rank that sees no sample.
        self.register_buffer("device_of", torch.empty(0), persistent=False)

    def update(self, count: int, **sums: Tensor) -> None:
        """Add one batch.

        Args:
            count: samples in the batch.
            sums: for each name a scalar, the sum over these samples.
        """
        for place, name in enumerate(self.names):
            value = sums[name]
            # On a GPU, item() would wait for the device in each step.
            added = value.item() if value.is_cpu else value.detach().to(self._dtype())
            # Not in place: a tensor made in inference mode cannot be changed outside of it.
            self._totals[place] = self._totals[place] + added
        self._totals[-1] += count

    def mean_so_far(self, name: str) -> float:
        """The mean over the samples of this rank so far; waits for the device."""
        count = float(self._totals[-1])
        if count == 0:
            return 0.0
        return float(self._totals[self.names.index(name)]) / count

    def means(self) -> dict[str, Tensor]:
        """The mean of each metric over all ranks, as ``<stage>/<name>``; starts a new epoch.

        Every rank must call this, also one that saw no sample.
        """
        totals = collectives.all_reduce(self.state())
        self._totals = [0] * len(totals)
        means = (totals[:-1] / totals[-1]).float()
        names = [f"{self.stage}/{name}" for name in self.names]
        return dict(zip(names, means, strict=True))

    def state(self) -> Tensor:
        """The sums of this rank so far, and the number of samples, ``[names + 1]``."""
        options: Any = {"device": self.device_of.device, "dtype": self._dtype()}
        return torch.stack([torch.as_tensor(total, **options) for total in self._totals])

    def load_state(self, totals: Tensor) -> None:
        """Continue from what ``state`` returned."""
        self._totals = totals.tolist()

    def _dtype(self) -> torch.dtype:
        # float64 keeps every count exact; Apple's GPUs do not have it.
        return torch.float32 if self.device_of.device.type == "mps" else torch.float64
