"""The order in which an epoch reads its samples: a pure function of the seed and the epoch.

An order is a function from positions ``start`` to ``stop`` of an epoch to sample ids, int64
``[stop - start]``. Each id comes exactly once in an epoch.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.data.seeds import generator, mix_seed

# Samples of a full shuffle that is kept in memory: 128 MiB, and a second to draw.
MAX_PERMUTATION = 2**24
# Feistel rounds. Four suffice with random round functions (Luby and Rackoff); ours are only mixed
# well, so there are two more, which cost 0.04 us per sample.
ROUNDS = 6

Order = Callable[[int, int], Tensor]


class Blocks(NamedTuple):
    """A shuffle for data that are read faster in blocks of neighbours, such as files in a store.

    The blocks of the data set are shuffled; then the samples of ``at_once`` blocks are shuffled
    together. So a batch touches ``at_once`` blocks, and not as many as it has samples.
    """

    size: int
    """Samples of a block."""
    at_once: int = 16
    """Blocks whose samples are mixed."""


def make_order(num_samples: int, shuffle: bool | Blocks, seed: int, epoch: int) -> Order:
    """The order of one epoch."""
    if not shuffle:
        return torch.arange
    if isinstance(shuffle, Blocks):
        return _BlockOrder(num_samples, shuffle, seed, epoch)
    # randperm needs 8 bytes per sample on every rank, and each start of an epoch waits for it.
    if num_samples > MAX_PERMUTATION:
        return _CipherOrder(num_samples, seed, epoch)
    order = torch.randperm(num_samples, generator=generator(seed, epoch))
    return lambda start, stop: order[start:stop]


class _BlockOrder:
    """Shuffles blocks, cuts their order into windows of ``at_once``, and shuffles each window."""

    def __init__(self, num_samples: int, blocks: Blocks, seed: int, epoch: int) -> None:
        self.num_samples = num_samples
        self.blocks = blocks
        self.seed = seed
        self.epoch = epoch
        num_blocks = -(-num_samples // blocks.size)
        self.order = torch.randperm(num_blocks, generator=generator(seed, epoch))
        lengths = torch.full((num_blocks,), blocks.size)
        # The last block of the data set may be short, and may stand anywhere in the order.
        lengths[self.order == num_blocks - 1] -= num_blocks * blocks.size - num_samples
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        # Where each window begins. Because of the short block it is no multiple of its size, so
        # the window of a position is searched and not computed.
        self.starts = starts[:-1][:: blocks.at_once].contiguous()
        # Two neighbouring batches may share a window, and a batch may end one and begin the next.
        self.window = lru_cache(maxsize=2)(self._draw_window)

    def __call__(self, start: int, stop: int) -> Tensor:
        # An empty tensor, because torch.cat needs one where the slice of a rank is empty.
        parts = [torch.empty(0, dtype=torch.int64)]
        number = int(torch.searchsorted(self.starts, start, right=True)) - 1
        while start < stop:
            first = int(self.starts[number])
            ids = self.window(number)
            # A slice of a tensor ends where the tensor ends, even if ``stop`` is in a later window.
            parts.append(ids[start - first : stop - first])
            start = first + len(ids)
            number += 1
        return torch.cat(parts)

    def _draw_window(self, number: int) -> Tensor:
        """The samples of a window, shuffled."""
        size, at_once = self.blocks
        blocks = self.order[number * at_once : (number + 1) * at_once]
        ids = (blocks[:, None] * size + torch.arange(size)).flatten()
        # The last block of the data set may be short: these ids would be beyond its end.
        ids = ids[ids < self.num_samples]
        # Seeded by the window, so that a resumed epoch draws only the window that it continues in.
        draw = generator(self.seed, self.epoch, number)
        return ids[torch.randperm(len(ids), generator=draw)]


class _CipherOrder:
    """A full shuffle that computes the samples of a slice when they are read.

    It needs neither memory nor time at the start of an epoch.

    Source: a Feistel network as a permutation of numbers of ``2 * half`` bits, Luby and Rackoff,
    https://doi.org/10.1137/0217022; results beyond the data set are permuted again (cycle walking,
    Black and Rogaway, https://doi.org/10.1007/3-540-45760-7_9).
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self.num_samples = num_samples
        # A Feistel network permutes numbers with an even number of bits: two halves. The smallest
        # that has room for every position has less than four times as many numbers as samples.
        half = -(-(num_samples - 1).bit_length() // 2)
        self.half = np.uint64(half)
        self.mask = np.uint64(2**half - 1)
        # The keys alone make the order of this epoch another than that of the next one.
        self.keys = [np.uint64(mix_seed(seed, epoch, number)) for number in range(ROUNDS)]

    def __call__(self, start: int, stop: int) -> Tensor:
        ids = self._encrypt(np.arange(start, stop, dtype=np.uint64))
        # A result beyond the data set is permuted again until it is a sample. This ends, because a
        # permutation comes back to where it started, which is a position of the data set; and two
        # positions never meet, because the walk could be followed backwards. So each sample still
        # comes exactly once. Less than four rounds are expected.
        while (beyond := ids >= self.num_samples).any():
            ids[beyond] = self._encrypt(ids[beyond])
        return torch.from_numpy(ids.astype(np.int64))

    def _encrypt(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Permute the numbers of ``2 * half`` bits."""
        left = numbers >> self.half
        right = numbers & self.mask
        for key in self.keys:
            # A round can be undone whatever _mix returns: the new left half is the old right one,
            # and with it the same bits are removed by xor. So no two numbers become equal.
            left, right = right, left ^ (_mix(right + key) & self.mask)
        return left << self.half | right


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, see ``mix_seed``; products of arrays wrap around."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
