"""Sets of images, read a batch at a time."""

from typing import NamedTuple

from torch import Tensor

from project.data.sources import ImageFiles, Images


class Batch(NamedTuple):
    """What a model is given."""

    images: Tensor
    """uint8 ``[B, C, H, W]``, as they are stored."""
    labels: Tensor
    """int64 ``[B]``, class indices."""
    ids: Tensor
    """int64 ``[B]``, positions in the files of the data set."""


class FileBatch(NamedTuple):
    """What a model is given to predict."""

    images: Tensor
    """uint8 ``[B, C, H, W]``."""
    files: list[str]


class ImageSet:
    """Some of the images of a source, read a batch at a time.

    Images in memory are bytes. Whole batches of them are gathered, and augmented at once.

    Args:
        source: all images, in memory or in files.
        ids: int64 ``[N]``, the images of this set.
        num_channels: of the images that are read from files.
        image_size: height and width of the images that are read from files, in pixels.
    """

    draws_random_numbers = False

    def __init__(
        self, source: Images | ImageFiles, ids: Tensor, *, num_channels: int, image_size: int
    ) -> None:
        self.source = source
        self.ids = ids
        self.num_channels = num_channels
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, positions: Tensor) -> Batch:
        """The images at these positions of the set, int64 ``[B]``."""
        # index_select copies whole images; indexing with [ids] copies pixel by pixel.
        ids = self.ids.index_select(0, positions)
        if isinstance(self.source, ImageFiles):
            images = self.source.read(ids, self.num_channels, self.image_size)
        else:
            # Otherwise each batch would wait until the GPU has taken all steps before it.
            ids = ids.to(self.source.images.device, non_blocking=True)
            images = self.source.images.index_select(0, ids)
        return Batch(images, self.source.labels.index_select(0, ids), ids)
