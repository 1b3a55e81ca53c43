"""Which samples each step sees, on which rank."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler


class Slice(NamedTuple):
    """One rank's part of one global batch."""

    ids: Tensor
    """Samples of this rank, int64 ``[B]``."""
    epoch: int
    number: int
    """Of the global batch within the epoch, from 0."""
    start: int
    """Position of the first of ``ids`` in the global batch."""
    global_size: int
    """Samples of the global batch, over all ranks."""


class GlobalBatchSampler(Sampler[Slice]):
    """Cuts a data set into global batches, and each global batch into one slice per rank.

    The order is a pure function of ``(seed, epoch)``: step ``s`` of an epoch consumes the same
    ``batch_size`` samples on any number of ranks, before and after any restart.

    With ``drop_last``, samples that do not fill an optimizer step are left out of the epoch.
    Otherwise the set is covered exactly once: the last global batch may be short, its slices
    unequal, and some of them empty. Either way every rank takes the same number of batches, and
    nothing is padded or repeated.

    Args:
        num_samples: size of the data set.
        batch_size: samples per batch, over all ranks.
        rank: of this process.
        world_size: number of ranks.
        seed: of the order.
        shuffle: draw a new order each epoch; otherwise keep that of the data set.
        drop_last: end the epoch with the last full optimizer step.
        batches_per_step: batches that make one optimizer step.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        batches_per_step: int = 1,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.batches_per_step = batches_per_step
        self.epoch = 0
        """Epoch of the next pass."""
        self.first_batch = 0
        """Batch the next pass begins with: not 0 when a run continues within an epoch."""

    def __len__(self) -> int:
        if self.drop_last:
            samples_per_step = self.batch_size * self.batches_per_step
            return self.num_samples // samples_per_step * self.batches_per_step
        return -(-self.num_samples // self.batch_size)  # rounded up

    def __iter__(self) -> Iterator[Slice]:
        if self.shuffle:
            order = torch.randperm(self.num_samples, generator=generator(self.seed, self.epoch))
        else:
            order = torch.arange(self.num_samples)
        first_batch, self.first_batch = self.first_batch, 0
        for index in range(first_batch, len(self)):
            ids = order[index * self.batch_size :][: self.batch_size]
            start = len(ids) * self.rank // self.world_size
            end = len(ids) * (self.rank + 1) // self.world_size
            yield Slice(ids[start:end], self.epoch, index, start, len(ids))


def mix_seed(*numbers: int) -> int:
    """One seed made of several whole numbers; neighbours give unrelated random streams.

    Source: the finalizer of splitmix64, Steele et al., https://doi.org/10.1145/2714064.2660195.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63


def generator(*numbers: int) -> torch.Generator:
    """A random generator on the CPU that is a pure function of some whole numbers."""
    return torch.Generator().manual_seed(mix_seed(*numbers))
