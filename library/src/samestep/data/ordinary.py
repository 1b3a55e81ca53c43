"""Ordinary DataLoaders, made exact: an epoch continues with the batch after its last step.

torch and Lightning start an interrupted epoch over. A DataLoader of torch asks its batch sampler
which samples come next, so the batches before are skipped there, and none of them is read. What
gives samples one after the other (an ``IterableDataset``, a loader of somebody else's) is read up
to the next batch instead.

Random numbers are seeded before each batch is read, by this process or by a loader process. So
they do not depend on what was read or trained before.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from samestep.data.sampler import SlicePositions, SplitBatches, WrappedBatches
from samestep.data.seeds import mix_seed, seed_sample
from samestep.ranks import environment


class Ids(list[Any]):
    """The positions of a batch. Whoever reads them samples the random numbers of this batch.

    The loader process that reads a batch gets nothing else from the process that trains. Those of
    ``SlicePositions`` are sampled for each position, so they do not depend on how a batch is split.
    """

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
        return Ids, (list(super().__iter__()), self.seed, self.start)


class ResumableBatches(WrappedBatches, BatchSampler):
    """The batches of another batch sampler, each with a seed, from any one on.

    Args:
        batches: the batch sampler.
        seed: of the run.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        self.batches = batches
        self.seed = seed
        self.start_at(0, 0)

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin the next pass with this batch of this epoch."""
        self.epoch, self.first, self.num_passes = epoch, batch, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        # The shorter of two loaders may have several passes in an epoch.
        numbers = self.seed, self.epoch, self.num_passes
        first, self.first = self.first, 0
        self.num_passes += 1
        batches = iter(self.batches)
        for number in count():
            # A batch sampler may sample each batch when it is asked for it, on all ranks the same.
            seed_sample(*numbers, number)
            try:
                ids = next(batches)
            except StopIteration:
                return
            if number >= first:
                is_list = isinstance(ids, (list, tuple))
                start = ids.start if isinstance(ids, SlicePositions) else None
                rank = environment.rank() if start is None else 0
                yield Ids(ids, mix_seed(*numbers, number, rank), start) if is_list else ids


def iterates_as_torch(loader: Any) -> bool:
    """Whether it is a DataLoader that has no way of its own to iterate."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def has_batches_of_ids(loader: Any) -> bool:
    """Whether it asks a map-style data set for batches of positions, and in the way of torch."""
    if not iterates_as_torch(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    # With batch_size=None each position is a batch, or the data set gets a list of its own.
    return loader.batch_sampler is not None


def resumable(loader: Any, seed: int) -> ResumableBatches | None:
    """Where the batches of a loader can be skipped; None if they must be read."""
    if not has_batches_of_ids(loader):
        return None
    if not isinstance(loader.batch_sampler, ResumableBatches):
        # DataLoader raises where this attribute is assigned.
        vars(loader)["batch_sampler"] = ResumableBatches(loader.batch_sampler, seed)
    batches = loader.batch_sampler
    assert isinstance(batches, ResumableBatches)
    return batches


def split_of(loader: Any) -> SplitBatches | None:
    """How the batches of an ordinary loader are split over the ranks; None if they are not."""
    batches = getattr(loader, "batch_sampler", None)
    batches = batches.batches if isinstance(batches, ResumableBatches) else batches
    return batches if isinstance(batches, SplitBatches) else None


def give_back(loader: Any) -> None:
    """Leave a loader as it was: Lightning makes a new one of it where it predicts."""
    while isinstance(getattr(loader, "batch_sampler", None), ResumableBatches | SplitBatches):
        vars(loader)["batch_sampler"] = loader.batch_sampler.batches
