"""DataLoaders of torch, made exact: an epoch resumes with the batch after its last step.

torch and Lightning start an interrupted epoch over. A DataLoader of torch asks its batch sampler
which samples come next, so the batches before are skipped there, and none of them is read. An
``IterableDataset`` or another library's loader, which give one batch after the other, are read up
to the next batch instead.

Random numbers are seeded before each batch is read, by this process or by a loader process. So
they do not depend on what was read or trained before.
"""

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice, tee
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from samestep.data.sampler import RankIndices, SeededIndices, SplitBatches, WrappedBatches
from samestep.data.seeds import isolated_rng, mix_seed, seed_sample
from samestep.ranks import virtual


class ResumableBatches:
    """The batches of another batch sampler, each with a seed; those already trained on are skipped.

    A batch sampler that knows how far the run has come may skip them itself. It begins with the
    batch that comes next, and then none is skipped here.

    Args:
        batches: the batch sampler.
        seed: of the run.
        num_ahead: batches that may have been drawn and not trained on.
    """

    def __init__(self, batches: Any, seed: int, num_ahead: int = 1) -> None:
        self.batches = batches
        self.seed = seed
        self._drawn: deque[tuple[int, Any]] = deque(maxlen=num_ahead)  # the last ones, numbered
        self._pass: Iterator[tuple[int, Any]] = iter(())  # the numbered batches that come next
        self._opening: int | None = None  # the checksum of the first batch of this pass
        self.start_at(0, 0)

    def start_at(self, epoch: int, batch: int, checksum: int | None = None) -> None:
        """Begin the next pass with this batch of this epoch, which had this checksum."""
        self.epoch, self.first, self.num_passes = epoch, batch, 0
        self._checksum = checksum

    def checksum(self, number: int) -> int | None:
        """The checksum of a batch that is not trained on yet.

        None if it is unknown, or if it does not tell this batch from the first one of the pass.
        """
        drawn = dict(self._drawn)
        if max(drawn, default=number) < number:
            # A signal came first. What a copy of the iterator draws, the iterator gives later.
            with isolated_rng():
                drawn.update(islice(copy.copy(self._pass), 1))
        found = checksum_of(drawn.get(number, []))
        return None if found in (self._opening, checksum_of([])) else found

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        # The shorter of two loaders may have several passes in an epoch.
        numbers = self.seed, self.epoch, self.num_passes
        first = self.first
        self.first = 0
        self.num_passes += 1
        (self._pass,) = tee(self._draw(numbers, first), 1)
        for number, slices in self._pass:
            self._drawn.append((number, slices))
            seeded = [*self._with_seeds(slices, numbers, number)]
            # Skipped batches are drawn too: the sampler may count or shuffle while it draws.
            if number >= first:
                yield from seeded

    def _draw(self, numbers: tuple[int, ...], first: int) -> Iterator[tuple[int, Any]]:
        num_skipped = 0  # by the batch sampler itself

        def seed(number: int) -> int:
            # Without the rank: a batch sampler may draw each batch when it is asked for it, and
            # must draw the same one on all ranks. Before each batch, because training has drawn
            # other numbers since the last one.
            seed_sample(*numbers, num_skipped + number)
            return number

        draws = zip(map(seed, count()), slices_of(self.batches), strict=False)
        for drawn, slices in draws:
            if drawn == 0:
                self._opening = checksum_of(slices)
                num_skipped = first if self._opening == self._checksum else 0
            number = num_skipped + drawn
            if num_skipped and not is_longer(self.batches, number + 1):
                # Lightning asks for no batch after the last one. A loop over the batches would, and
                # only then a batch sampler may forget that it has skipped some.
                next(draws, None)
            yield number, slices

    def _with_seeds(
        self, slices: list[Any], numbers: tuple[int, ...], number: int
    ) -> Iterator[Any]:
        for slice_, indices in zip(virtual.layout().own, slices, strict=True):
            if isinstance(indices, RankIndices):
                indices.split.number_batch(number, indices)
                # Seeded by position in the whole batch, which is the same for every split.
                yield SeededIndices(indices, mix_seed(*numbers, number, 0), indices.start)
            elif isinstance(indices, (list, tuple)):
                # Each slice has samples of its own, whose transforms draw other numbers.
                yield SeededIndices(indices, mix_seed(*numbers, number, slice_))
            else:
                # Such as a tensor, for a data set that takes one: a list would be something else.
                yield indices


def slices_of(batches: Any) -> Iterator[list[Any]]:
    """The slices of this process, of one batch of a batch sampler after the other."""
    if isinstance(batches, WrappedBatches):
        slices: Iterator[list[Any]] = batches.plan.draw()
        return slices
    return ([indices] for indices in batches)


def checksum_of(slices: list[Any]) -> int:
    """The checksum of the indices of a batch, of those of all ranks if it is split."""
    first, *_ = slices or [()]
    return zlib.crc32(repr(getattr(first, "whole", first)).encode())


def is_longer(batches: Any, num_batches: int) -> bool:
    """Whether a batch sampler has more batches; without a length it is endless."""
    # Not by hasattr: SplitBatches has a length only if the batch sampler in it has one.
    try:
        return len(batches) > num_batches
    except TypeError:
        return True


def has_batches_of_ids(loader: Any) -> bool:
    """Whether it asks a map-style data set for batches of indices, as torch's DataLoader does."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    # With batch_size=None the sampler gives whole batches, or single samples that are batches.
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def resumable(loader: Any, seed: int) -> ResumableBatches | None:
    """The batch sampler in which batches of a loader can be skipped; None if they must be read."""
    if not has_batches_of_ids(loader):
        return None
    batches = loader.batch_sampler
    if not isinstance(getattr(batches, "plan", None), ResumableBatches):
        # Its processes read ahead, and without a length Lightning reads one more batch.
        num_ahead = loader.num_workers * (loader.prefetch_factor or 0) + 2
        # Assigning this attribute raises an error after a DataLoader was made.
        plan = ResumableBatches(batches, seed, num_ahead)
        vars(loader)["batch_sampler"] = WrappedBatches(batches, plan)
    found: ResumableBatches = loader.batch_sampler.plan
    return found


def split_of(loader: Any) -> SplitBatches | None:
    """How the batches of an ordinary loader are split over the ranks; None if they are not."""
    batches = getattr(loader, "batch_sampler", None)
    while isinstance(batches, WrappedBatches):
        if isinstance(batches.plan, SplitBatches):
            return batches.plan
        batches = batches.batches
    return None


def are_split(loaders: Iterable[Any]) -> bool:
    """Whether the batches of all these loaders are split over the ranks."""
    # Not by their truth: a batch sampler without a length, such as an endless one, has none.
    return all(split_of(loader) is not None for loader in loaders)


def unwrap(loader: Any) -> None:
    """Give a loader its own batch sampler again.

    The caller may use the loader after the run; and to predict, Lightning makes a new one with the
    arguments of the batch sampler that it finds.
    """
    while isinstance(getattr(loader, "batch_sampler", None), WrappedBatches):
        vars(loader)["batch_sampler"] = loader.batch_sampler.batches
