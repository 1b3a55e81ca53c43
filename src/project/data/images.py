"""Sets of images, read a batch at a time."""

from typing import NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

from project.data.sources import ImageFiles, Images
from samestep.data.sampler import Slice


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
