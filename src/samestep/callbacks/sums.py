"""Metrics of one epoch that are exact on any number of ranks, before and after an interruption."""

import torch
from torch import Tensor, nn
from torch import distributed as dist


class Sums(nn.Module):
    """Sums over the samples of one epoch, kept on the device and read once at its end.

    Sums, unlike means, add up over batches and ranks of unequal size, so the epoch's means are
    exact however the samples were shared out. Nothing is synchronized with the device or between
    ranks before ``means``. ``KeepSums`` saves them when an epoch is interrupted.

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
        self._totals: Tensor | None = None  # [names, and the number of samples last]
        # Empty; it follows the model to its device, also on a rank that sees no sample.
        self.register_buffer("device_of", torch.empty(0), persistent=False)

    def update(self, count: int, **sums: Tensor) -> None:
        """Add one batch.

        Args:
            count: samples in the batch.
            sums: for each name a scalar, the sum over these samples.
        """
        with torch.no_grad():
            batch = self._one_row([sums[name].detach() for name in self.names], count)
            self._totals = batch if self._totals is None else self._totals.add_(batch)

    def mean_so_far(self, name: str) -> float:
        """The mean over the samples of this rank so far; waits for the device."""
        if self._totals is None:
            return 0.0
        return float(self._totals[self.names.index(name)] / self._totals[-1])

    def means(self) -> dict[str, Tensor]:
        """The mean of each sum over all ranks, as ``<stage>/<name>``, and begin a new epoch.

        Every rank must call this, also one that saw no sample.
        """
        totals = self.state()
        self._totals = None
        if dist.is_initialized():
            dist.all_reduce(totals)
        means = (totals[:-1] / totals[-1]).float()
        return {f"{self.stage}/{name}": m for name, m in zip(self.names, means, strict=True)}

    def state(self) -> Tensor:
        """The sums of this rank so far, and the number of samples, ``[names + 1]``."""
        if self._totals is not None:
            return self._totals
        return torch.zeros(len(self.names) + 1, dtype=self._dtype(), device=self.device_of.device)

    def load_state(self, totals: Tensor) -> None:
        """Go on from what ``state`` gave."""
        self._totals = totals.clone().to(self.device_of.device)

    def _one_row(self, values: list[Tensor], count: int) -> Tensor:
        """The sums of one batch and its number of samples, ``[names + 1]``."""
        if values[0].device.type == "cpu":
            # Reading a number takes less time here than an operation on a small tensor.
            return torch.tensor([*(value.item() for value in values), count], dtype=self._dtype())
        return torch.stack([*values, torch.full_like(values[0], count)]).to(self._dtype())

    def _dtype(self) -> torch.dtype:
        # float64 keeps every count exact; Apple's GPUs do not have it.
        return torch.float32 if self.device_of.device.type == "mps" else torch.float64
