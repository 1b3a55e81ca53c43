"""Metrics of one epoch that are exact on any number of ranks, before and after an interruption."""

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist


class Sums(nn.Module):
    """Sums over the samples of one epoch, kept on the device and read once at its end.

    Sums, unlike means, add up over batches and ranks of unequal size, so the epoch's means are
    exact however the samples were shared out. Nothing is synchronized with the device or between
    ranks before ``means``. ``RankState`` saves them when an epoch is interrupted.

    Args:
        stage: prefix of the metrics: train, val or test.
        names: what is summed, such as ``"loss"``.

    Example:
        In a LightningModule::

            self.train_sums = Sums("train", "loss")             # in __init__
            self.train_sums.update(len(x), loss=loss * len(x))  # in training_step
            self.log_dict(self.train_sums.means(), sync_dist=True)  # in on_train_epoch_end
    """

    device_of: Tensor

    def __init__(self, stage: str, *names: str) -> None:
        super().__init__()
        self.stage = stage
        self.names = names
        # Of each name, and the number of samples last: on the CPU numbers, otherwise tensors.
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
            # Adding small tensors on the CPU takes longer than adding numbers.
            added = value.item() if value.is_cpu else value.detach().to(self._dtype())
            # Not in place, which a tensor of a validation, in inference mode, allows only there.
            self._totals[place] = self._totals[place] + added
        self._totals[-1] += count

    def mean_so_far(self, name: str) -> float:
        """The mean over the samples of this rank so far; waits for the device."""
        count = float(self._totals[-1])
        return float(self._totals[self.names.index(name)]) / count if count else 0.0

    def means(self) -> dict[str, Tensor]:
        """The mean of each sum over all ranks, as ``<stage>/<name>``, and begin a new epoch.

        Every rank must call this, also one that saw no sample.
        """
        totals = self.state()
        self._totals = [0] * len(totals)
        if dist.is_initialized():
            dist.all_reduce(totals)
        means = (totals[:-1] / totals[-1]).float()
        return {f"{self.stage}/{name}": m for name, m in zip(self.names, means, strict=True)}

    def state(self) -> Tensor:
        """The sums of this rank so far, and the number of samples, ``[names + 1]``."""
        device, dtype = self.device_of.device, self._dtype()
        return torch.stack(
            [torch.as_tensor(total, dtype=dtype, device=device) for total in self._totals]
        )

    def load_state(self, totals: Tensor) -> None:
        """Go on from what ``state`` gave."""
        self._totals = totals.tolist()

    def _dtype(self) -> torch.dtype:
        # float64 keeps every count exact; Apple's GPUs do not have it.
        return torch.float32 if self.device_of.device.type == "mps" else torch.float64
