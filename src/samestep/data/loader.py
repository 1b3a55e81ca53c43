"""Sets of images, read a batch at a time."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from torch.utils.data import DataLoader

from samestep.data.sampler import GlobalBatchSampler
from samestep.ranks import stopping


class BatchLoader:
    """Iterates over a set in the order of a sampler.

    The order is that of the training loop's epoch, and begins at the loop's batch. Both are looked
    up when the first batch is asked for: Lightning makes the iterator of a run that continues
    before it has restored its position.

    Args:
        dataset: what is read.
        sampler: which images, in which order.
        num_workers: processes that read ahead; 0 reads in this process.
        loop: the training loop; None always begins with batch 0 of epoch 0.
        between_steps: called before the images of each optimizer step are handed out, also when a
            signal ended the wait for them.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: GlobalBatchSampler,
        *,
        num_workers: int,
        loop: _FitLoop | None,
        between_steps: Callable[[], None] | None,
    ) -> None:
        self.dataset = dataset
        self.order = sampler  # as `sampler`, Lightning would take this for a DataLoader
        self.loop = loop
        self.between_steps = between_steps
        self.batches: DataLoader[Any] | None = None
        if num_workers:
            self.batches = DataLoader(
                dataset,
                sampler=sampler,
                batch_size=None,
                num_workers=num_workers,
                persistent_workers=True,
                worker_init_fn=stopping.end_quietly,
                pin_memory=torch.cuda.is_available(),
                generator=torch.Generator(),  # leaves the global random state alone
            )

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        if self.loop is not None:
            self.order.epoch = self.loop.epoch_progress.current.processed  # type: ignore[attr-defined]
            done = self.loop.epoch_loop.batch_progress.current.ready
            self.order.first_batch = done if done < len(self) else 0
        first = self.order.first_batch
        batches = iter(self.batches or map(self.dataset.__getitem__, self.order))
        for number in range(first, len(self)):
            if self.between_steps is None or number % self.order.batches_per_step:
                yield next(batches)
                continue
            with suppress(stopping.Stopped), stopping.at_once():
                batch = next(batches)
            self.between_steps()  # raises Stopped on all ranks if one was told to stop
            yield batch
