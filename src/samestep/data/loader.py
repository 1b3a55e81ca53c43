"""Batches of any data set in an exact order, shared out over the ranks."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from samestep.data.sampler import GlobalBatchSampler, Slice
from samestep.ranks import environment, stopping


class BatchDataset(Protocol):
    """A data set that gives several samples at once."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, ids: Tensor) -> Any:
        """The samples ``ids``, int64 ``[B]``, as one batch. ``B`` may be 0 in evaluation."""
        ...


class BatchLoader:
    """Batches in an order that depends on the seed and the epoch only.

    Each optimizer step sees the same samples on any number of ranks, and a run that continues goes
    on with the batch after its last step. Under a Trainer, ``ResumeOrder`` says where to begin.

    Args:
        dataset: answers ``dataset[ids]`` for a tensor of positions; ``TensorDataset`` does.
        batch_size: samples per optimizer step, over all ranks. It need not divide by their number.
        shuffle: draw a new order each epoch; otherwise keep that of the data set.
        drop_last: leave out samples that do not fill an optimizer step.
        seed: of the order.
        accumulate_grad_batches: batches into which an optimizer step is cut, as the Trainer
            accumulates them.
        num_workers: processes that read ahead; 0 reads in this process.
        with_slice: give ``(batch, slice)`` instead of ``batch``. Augmentations need the slice if
            they shall not depend on the number of ranks.
    """

    def __init__(
        self,
        dataset: BatchDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        accumulate_grad_batches: int = 1,
        num_workers: int = 0,
        with_slice: bool = False,
    ) -> None:
        self.dataset = dataset
        self.with_slice = with_slice
        # An attribute called `sampler` would make Lightning take this for a DataLoader.
        self.order = GlobalBatchSampler(
            len(dataset),
            batch_size,
            rank=environment.rank(),
            world_size=environment.world_size(),
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            batches_per_step=accumulate_grad_batches,
        )
        self.workers: DataLoader[Any] | None = None
        if num_workers:
            self.workers = DataLoader(
                _Slices(dataset),
                sampler=self.order,
                batch_size=None,
                num_workers=num_workers,
                persistent_workers=True,
                pin_memory=torch.cuda.is_available(),
                generator=torch.Generator(),  # leaves the global random state alone
            )

    def __len__(self) -> int:
        return len(self.order)

    def start_at(self, epoch: int, batch: int) -> None:
        """Begin the next pass with this batch of this epoch."""
        self.order.epoch = epoch
        self.order.first_batch = batch

    def __iter__(self) -> Iterator[Any]:
        # This is a generator, so the order is looked up when the first batch is asked for.
        # Lightning makes the iterator earlier, before it has restored the state of the run.
        first = self.order.first_batch
        slices = iter(self.workers or map(_Slices(self.dataset).__getitem__, self.order))
        for _ in range(first, len(self)):
            batch, place = self._wait_for(slices)
            yield (batch, place) if self.with_slice else batch

    def _wait_for(self, slices: Iterator[tuple[Any, Slice]]) -> tuple[Any, Slice]:
        """The next batch; between two optimizer steps, a signal ends the wait for it and the run.

        ``StopBetweenSteps`` says when that is, because it has the ranks ask each other.
        """
        try:
            with stopping.interruptible():
                return next(slices)
        except stopping.Stopped:
            # The other ranks ask before this step whether to stop. This rank answers.
            stopping.check()
            raise


class _Slices(Dataset[tuple[Any, Slice]]):
    """The samples of a slice, and the slice itself."""

    def __init__(self, dataset: BatchDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, place: Slice) -> tuple[Any, Slice]:
        return self.dataset[place.ids], place


def count_samples(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, (dict, list, tuple)):
        return 0
    return next(filter(None, map(count_samples, parts)), 0)
