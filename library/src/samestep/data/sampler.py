"""Which samples each step sees, on which rank."""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler

from samestep.data.seeds import generator, isolated_rng, mix_seed, seed_sample
from samestep.ranks import virtual


class Slice(NamedTuple):
    """One rank's slice of one global batch."""

    ids: Tensor
    """Its samples, int64 ``[B]``."""
    epoch: int
    number: int
    """Of the global batch within the epoch, from 0."""
    start: int
    """Position of the first of ``ids`` in the global batch."""
    global_size: int
    """Samples of the global batch, over all ranks."""

    def generator(self, seed: int) -> torch.Generator:
        """A random generator on the CPU that is the same on all ranks.

        It depends on ``seed``, the epoch and the batch only. Draw ``global_size`` numbers, and take
        those from ``start`` on: each sample then has the same number on any number of ranks.
        """
        return generator(seed, self.epoch, self.number)


class GlobalBatchSampler(Sampler[Slice]):
    """Cuts a data set into global batches, and each global batch into one slice per rank.

    With ``virtual_ranks`` a process has several slices of each batch, one after the other.

    The order is a pure function of the epoch: step ``s`` of an epoch consumes the same
    ``batch_size`` samples on any number of ranks, before and after any restart. The slices of a
    batch are as long as ``shares`` says. With equal shares they differ by one sample at most.

    With ``drop_last``, samples that do not fill an optimizer step are left out of the epoch.
    Otherwise the set is covered exactly once, and the last step may be short. Either way every rank
    takes the same number of batches, and nothing is padded or repeated. A slice is empty only if
    its batch has fewer samples than there are ranks.

    Args:
        num_samples: size of the data set.
        batch_size: samples per optimizer step, over all ranks.
        rank: of this process.
        world_size: number of ranks.
        order_of: the order of an epoch: a function from positions ``start`` to ``stop`` to samples.
        drop_last: end the epoch with the last full optimizer step.
        batches_per_step: batches into which a step is cut; they differ by one sample at most.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        order_of: Callable[[int], Callable[[int, int], Tensor]],
        drop_last: bool,
        batches_per_step: int = 1,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.own = range(rank, rank + 1)
        """The slices of this process."""
        self.world_size = world_size
        self.order_of = order_of
        self.drop_last = drop_last
        self.batches_per_step = batches_per_step
        self.shares: tuple[float, ...] = (1.0,) * world_size
        """How much of each batch every rank gets, in any unit; ``SliceWeighting`` sets it."""
        self.epoch = 0
        """Epoch of the next pass."""
        self.first_batch = 0
        """Batch the next pass begins with: not 0 when a run resumes within an epoch."""

    def __len__(self) -> int:
        full_steps, rest = divmod(self.num_samples, self.batch_size)
        num_steps = full_steps + (rest > 0 and not self.drop_last)
        return num_steps * self.batches_per_step

    def __iter__(self) -> Iterator[Slice]:
        order = self.order_of(self.epoch)
        # Only the first pass after a resume begins within an epoch.
        first_batch = self.first_batch
        self.first_batch = 0
        for index in range(first_batch, len(self)):
            begin, size = self._find_batch(index)
            lengths = split(size, self.shares)
            for number in self.own:
                start = sum(lengths[:number])
                first = begin + start
                ids = order(first, first + lengths[number])
                yield Slice(ids, self.epoch, index, start, size)

    def deal(self, layout: virtual.Layout, shares: Sequence[float] = ()) -> None:
        """Give this process its slices of each batch; ``shares`` are how long they are."""
        self.own, self.world_size = layout.own, layout.total
        self.shares = tuple(shares) or (1.0,) * layout.total

    def size_of_step(self, index: int) -> int:
        """Samples of the optimizer step that batch ``index`` belongs to, over all ranks."""
        first = index // self.batches_per_step * self.batch_size
        return min(self.batch_size, self.num_samples - first)

    def lengths(self, index: int) -> tuple[int, ...]:
        """Samples of each rank in batch ``index`` of an epoch."""
        return split(self._find_batch(index)[1], self.shares)

    def weight(self, index: int) -> float:
        """Loss weight of the current slice, so that every sample of the step counts equally.

        DDP takes the mean over ranks, and Lightning the mean over the batches of a step. With these
        weights the gradient is the mean over all samples of the step. 1 if all slices are equal.
        """
        equal_parts = self.world_size * self.batches_per_step
        return self.lengths(index)[current(self.own)] * equal_parts / self.size_of_step(index)

    def weights_of_ranks(self) -> list[float]:
        """The weight of each rank in a mean over the ranks; 1 on average."""
        # Over the first step, like which all full steps are cut.
        lengths = map(self.lengths, range(self.batches_per_step))
        samples = [sum(of_rank) for of_rank in zip(*lengths, strict=True)]
        return [own * self.world_size / sum(samples) for own in samples]

    def has_equal_slices(self) -> bool:
        """Whether every weight of an epoch is 1, on every rank."""
        return all(map(self._is_equal, self._different_batches()))

    def _is_equal(self, index: int) -> bool:
        equal_parts = self.world_size * self.batches_per_step
        return {*self.lengths(index)} == {self.size_of_step(index) / equal_parts}

    def has_empty_slices(self) -> bool:
        """Whether some rank gets no sample of some batch."""
        return any(0 in self.lengths(index) for index in self._different_batches())

    def _different_batches(self) -> set[int]:
        """Batches of the first and the last step; all other steps are cut like the first."""
        batches = range(len(self))
        return {*batches[: self.batches_per_step], *batches[-self.batches_per_step :]}

    def _find_batch(self, index: int) -> tuple[int, int]:
        """Where batch ``index`` begins in the order of an epoch, and how many samples it has."""
        step, number = divmod(index, self.batches_per_step)
        size = self.size_of_step(index)
        # Rounded at each cut, not per batch, so that the batches have exactly the samples of the
        # step, also if it does not divide.
        begin = size * number // self.batches_per_step
        end = size * (number + 1) // self.batches_per_step
        return step * self.batch_size + begin, end - begin


class ExactLoader:
    """A loader that reads the slices of a ``GlobalBatchSampler``, such as ``BatchLoader``.

    This is all that a run asks of it, so that only who uses one imports how it reads.
    """

    order: GlobalBatchSampler
    """What each batch consists of."""
    slices: Any
    """The batches of this rank, by their slices."""
    workers: DataLoader[Any] | None
    """The loader processes; None if this process reads."""

    def __len__(self) -> int:
        return len(self.order)

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin the next pass with this batch of this epoch."""
        self.order.epoch = epoch
        self.order.first_batch = batch

    def draws_by_slice(self) -> bool:
        """Whether a batch has random numbers that depend on where the rank's slice begins in it."""
        raise NotImplementedError


class WrappedBatches(BatchSampler):
    """Stands in a loader for its batch sampler: it has other batches, and the same attributes.

    Code of the user may read and set attributes of the batch sampler while it trains. So the state
    of the run is in the plan, where its names cannot be those of the user's attributes.

    Args:
        batches: the batch sampler.
        plan: what is iterated over instead.
    """

    __slots__ = "batches", "plan"

    def __init__(self, batches: Any, plan: Any) -> None:
        self.batches = batches
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WrappedBatches.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.batches, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a loader is none of the run.
        return copy.copy, (self.batches,)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """What ``vars`` gives."""
        attributes: dict[str, Any] = vars(self.batches)
        return attributes


class BatchesOfRank:
    """Deals the batches of a batch sampler to the slices: each gets every ``total``-th one.

    The first batches are repeated at the end if some slices would get one less.

    Args:
        batches: the batch sampler; it must give the same batches on every rank.
        own: the slices of this process.
        total: number of slices.
    """

    def __init__(self, batches: Any, own: range, total: int) -> None:
        self.batches = batches
        self.own = own
        self.total = total

    def __len__(self) -> int:
        return -(-len(self.batches) // self.total)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.draw())

    def draw(self) -> Iterator[list[Any]]:
        """What each step gets, one batch for each slice of this process."""
        batches = draw_batches(self.batches)
        first_group = group = list(islice(batches, self.total))
        while group:
            # Only the last group can be too short. The first one fills it, repeatedly if it is the
            # last one too: a step waits for every slice, so none may have fewer batches.
            filled = chain(group, cycle(first_group))
            yield [*islice(filled, self.own.start, self.own.stop)]
            group = list(islice(batches, self.total))


def draw_batches(batches: Any) -> Iterator[Any]:
    """The batches of a batch sampler, drawn at once if their number is known."""
    # A sampler may draw random numbers for each batch, and between two steps the ranks draw
    # different ones, such as for dropout: it would then give other batches on each rank. A sampler
    # without a length may be endless, and cannot be drawn at once.
    if hasattr(batches, "__len__"):
        return iter(list(batches))
    return iter(batches)


class RankIndices(list[Any]):
    """The indices of one rank's slice of a batch.

    Args:
        ids: the indices.
        start: where the slice begins in the batch.
        whole: the indices of the whole batch.
        split: gets the number of the batch.
    """

    def __init__(self, ids: Iterable[Any], start: int, whole: list[Any], split: Any) -> None:
        super().__init__(ids)
        self.start = start
        self.whole = whole
        self.split = split

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader process reads the slice, and needs nothing else.
        return list, ([*self],)


class SeededIndices(list[Any]):
    """The indices of a batch, which seed the random numbers of the process that reads them.

    The numbers of ``RankIndices`` are seeded for each index, so that they do not depend on how a
    batch is split.
    """

    # A list that acts when it is read, because the indices are all that a loader process gets for a
    # batch; a worker_init_fn is called once per process, and one batch may be read by any of them.

    def __init__(self, ids: Any, seed: int, start: int | None = None) -> None:
        super().__init__(ids)
        self.seed = seed
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        if self.start is not None:
            return self._seed_each(self.start)
        seed_sample(self.seed)
        return super().__iter__()

    def _seed_each(self, start: int) -> Iterator[Any]:
        for position, id in enumerate(super().__iter__(), start):
            seed_sample(self.seed, position)
            yield id

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle iterates over a list, and would seed the process that trains.
        return SeededIndices, (list(super().__iter__()), self.seed, self.start)


class SplitBatches:
    """Cuts each batch of a batch sampler into slices, one per rank or virtual rank.

    So a step sees the same samples on any number of ranks. The slices of a batch differ by one
    sample at most. A rank that would get none gets the first sample once more, with a weight of 0.

    Args:
        batches: the batch sampler; it must give the same batches on every rank.
        own: the slices of this process.
        total: number of slices.
        seed: of the random numbers that the batch sampler and the samples draw, the same for each
            pass; None leaves them to the caller.
    """

    def __init__(self, batches: Any, own: range, total: int, seed: int | None = None) -> None:
        self.batches = batches
        self.own = own
        self.total = total
        self.seed = seed
        self.digest = 0
        """Of the first batch of this pass; it must be equal on all ranks."""
        self.is_unequal = False
        """Whether some batch did not divide by the number of ranks."""
        self._sizes: dict[int, int] = {}
        """Samples of whole batches that were drawn and not used."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[RankIndices]:
        return chain.from_iterable(self.draw())

    def draw(self) -> Iterator[list[Any]]:
        """The slices of this process, of one batch after the other."""
        for number, batch in enumerate(self._draw()):
            ids = list(batch)
            # The first batch is enough to see that the ranks shuffle with different seeds.
            if number == 0:
                self.digest = zlib.crc32(repr(ids).encode())
            if self.seed is not None:
                self._sizes[number] = len(ids)
            lengths = self._split(len(ids))
            self.is_unequal |= len({*lengths}) > 1
            slices = []
            for slice_ in self.own:
                # Not an empty slice: a collate function cannot make a batch of no samples. Such a
                # slice begins at the end of the batch, and gets the first sample instead.
                start = sum(lengths[:slice_]) % max(1, len(ids))
                stop = start + max(1, lengths[slice_])
                indices: Any = RankIndices(ids[start:stop], start, ids, self)
                if self.seed is not None:
                    # What the samples of an evaluation draw depends on their places only.
                    indices = SeededIndices(indices, mix_seed(self.seed, number), start)
                slices.append(indices)
            yield slices

    def _draw(self) -> Iterator[Any]:
        if self.seed is None:
            return iter(self.batches)
        with isolated_rng():
            seed_sample(self.seed)
            return draw_batches(self.batches)

    def number_batch(self, index: int, batch: RankIndices) -> None:
        """Note which one of the epoch this batch is: the batch sampler may have skipped some."""
        self._sizes[index] = len(batch.whole)

    def weight(self, index: int) -> float:
        """Loss weight of the current slice, so that every sample of the step counts equally."""
        # The step before is over. Later batches may be drawn already, by loaders that read ahead.
        self._sizes.pop(index - 1, None)
        return self.lengths(index)[current(self.own)] * self.total / self._sizes[index]

    def lengths(self, index: int) -> tuple[int, ...]:
        """Samples of each rank in batch ``index``, which was drawn and not yet trained on."""
        return self._split(self._sizes[index])

    def _split(self, size: int) -> tuple[int, ...]:
        return split(size, (1.0,) * self.total)

    def weights_of_ranks(self) -> list[float]:
        """The weight of each rank in a mean over the ranks; 1 on average."""
        # A batch sampler that fills buckets has no batch_size: its ranks count the same.
        size = getattr(self.batches, "batch_size", None) or self.total
        return [length * self.total / size for length in self._split(size)]


def current(own: range) -> int:
    """The slice that is computed now."""
    return own[0] if len(own) == 1 else virtual.current()


@lru_cache
def split(size: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Cut ``size`` samples into slices whose lengths are in proportion to ``shares``.

    Each slice gets the whole part of its quota. The samples that are left go to the largest
    fractions, to the first of equal ones. If there are as many samples as slices, none is empty.

    Source: the method of the largest remainder (Hamilton).
    """
    # Fractions are exact: rounded quotas could differ between machines, and the sum of large shares
    # could be infinite. They are slow, so results are cached; an epoch has two sizes of batches.
    total = sum(map(Fraction, shares))
    quotas = [size * Fraction(share) / total for share in shares]
    lengths = [int(quota) for quota in quotas]
    by_fraction = sorted(range(len(shares)), key=lambda rank: lengths[rank] - quotas[rank])
    for rank in by_fraction[: size - sum(lengths)]:
        lengths[rank] += 1
    # A rank without a sample would need a step of its own kind: the longest slice gives it one.
    while 0 in lengths and size >= len(shares):
        lengths[lengths.index(max(lengths))] -= 1
        lengths[lengths.index(0)] += 1
    return tuple(lengths)
