"""Metrics of one epoch that are exact on any number of ranks, before and after an interruption."""

from collections.abc import Sequence

import torch
from torch import Tensor

from samestep.ranks import devices, virtual
from samestep.ranks.epoch_sums import EpochSums

READ_EVERY = 50  # batches on a device, whose sums are read together


class EpochMean(EpochSums):
    """Means of one epoch over all samples and ranks, kept on the device and read at its end.

    It adds up sums and the number of samples. Sums, unlike means, stay exact over batches and
    ranks of unequal size. Nothing is synchronized between ranks before ``means``, and with a GPU
    only after every ``READ_EVERY`` batches. A checkpoint within an epoch keeps what was added so
    far.

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
        # One for each name, and the number of samples last. Python numbers have 64 bits, and adding
        # small tensors takes longer.
        self._totals: list[float] = [0] * (len(names) + 1)
        # Of each batch whose sums are on a device still: their places, and the sums.
        self._waiting: list[tuple[list[int], Tensor]] = []
        # Empty; it follows the model to its device, also on a rank that sees no sample.
        self.register_buffer("device_of", torch.empty(0), persistent=False)

    def update(self, count: int, **sums: Tensor) -> None:
        """Add one batch.

        Args:
            count: samples in the batch.
            sums: for each name a scalar, the sum over these samples.
        """
        places = []
        for place, name in enumerate(self.names):
            value = sums[name]
            # On a GPU, item() would wait for the device in each step.
            if devices.is_at_hand(value):
                self._totals[place] += value.item()
            else:
                places.append(place)
        if places:
            self._waiting.append((places, self._copy([sums[self.names[i]] for i in places])))
        if len(self._waiting) >= READ_EVERY:
            self._read()
        self._totals[-1] += count

    def mean_so_far(self, name: str) -> float:
        """The mean over the samples of this rank so far; waits for the device."""
        self._read()
        count = self._totals[-1]
        if count == 0:
            return 0.0
        return self._totals[self.names.index(name)] / count

    def means(self) -> dict[str, Tensor]:
        """The mean of each metric over all ranks, as ``<stage>/<name>``; starts a new epoch.

        Every rank must call this, also one that saw no sample.
        """
        # In the order of the slices: the sum has the same bits on any number of ranks.
        of_slices = virtual.gather(self._take)
        totals = torch.tensor(of_slices, dtype=torch.float64).sum(0)
        means = (totals[:-1] / totals[-1]).float().to(self.device_of.device)
        names = [f"{self.stage}/{name}" for name in self.names]
        return dict(zip(names, means, strict=True))

    def _take(self) -> list[float]:
        """The sums so far, and begin again."""
        self._read()
        totals, self._totals = self._totals, [0] * len(self._totals)
        return totals

    def state(self) -> Tensor:
        """The sums of this rank so far, and the number of samples, float64 ``[names + 1]``."""
        self._read()
        # On the CPU: a checkpoint must hold all their bits, and Apple's GPUs would round them.
        return torch.tensor(self._totals, dtype=torch.float64)

    def load_state(self, totals: Tensor) -> None:
        """Continue from what ``state`` returned."""
        self._totals = totals.tolist()
        self._waiting = []

    def _copy(self, values: Sequence[Tensor]) -> Tensor:
        """The same numbers in other memory: a module may change its own in place.

        One kernel copies them, if they have one type. It must be exact for all of them.
        """
        types = {value.dtype for value in values}
        if len(types) > 1 or not values[0].is_floating_point():
            values = [value.to(self._dtype()) for value in values]
        return torch.stack([value.detach() for value in values])

    def _read(self) -> None:
        """Add what is on the device, in the order of the batches: a sum depends on its order."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        numbers = iter(torch.cat([sums for _, sums in waiting]).tolist())
        for places, _ in waiting:
            for place in places:
                self._totals[place] += next(numbers)

    def _dtype(self) -> torch.dtype:
        # float64 keeps every count exact; Apple's GPUs do not have it.
        return torch.float32 if self.device_of.device.type == "mps" else torch.float64
