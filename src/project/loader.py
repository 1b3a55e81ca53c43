"""Sets of images, read a batch at a time."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project import stopping
from project.datasets import ImageFiles, Images
from project.sampler import GlobalBatchSampler, Slice


class Batch(NamedTuple):
    """What a model is given."""

    images: Tensor
    """float32 ``[B, C, H, W]``, zero mean and unit variance per channel."""
    labels: Tensor
    """int64 ``[B]``, class indices."""
    ids: Tensor
    """int64 ``[B]``, positions in the files of the data set."""


class RawBatch(NamedTuple):
    """What a loader yields: pixels as they are stored."""

    images: Tensor
    """uint8 ``[B, C, H, W]``."""
    labels: Tensor
    ids: Tensor
    where: Slice


class ImageSet(Dataset[RawBatch]):
    """Some of the images of a source, read a batch at a time.

    Args:
        source: all images, in memory or in files.
        ids: int64 ``[N]``, the images of this set.
        num_channels: of the images that are read from files.
        image_size: height and width of the images that are read from files, in pixels.
    """

    def __init__(
        self, source: Images | ImageFiles, ids: Tensor, *, num_channels: int, image_size: int
    ) -> None:
        self.source = source
        self.ids = ids
        self.num_channels = num_channels
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: Slice) -> RawBatch:
        ids = self.ids[where.ids]
        if isinstance(self.source, Images):
            ids = ids.to(self.source.images.device)
            images = self.source.images[ids]
        else:
            images = self.source.read(ids, self.num_channels, self.image_size)
        return RawBatch(images, self.source.labels[ids], ids, where)


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
        dataset: ImageSet,
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
        self.batches: DataLoader[RawBatch] | None = None
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

    def __iter__(self) -> Iterator[RawBatch]:
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
