"""What is done to a whole batch of training images."""

import torch
from torch import Tensor
from torch.nn import functional as F

from project.data.images import Batch
from samestep import Slice


class Augment:
    """Shifts each image by a few pixels, and mirrors half of them left to right.

    The random numbers of an image are a pure function of ``(seed, epoch, batch, position in the
    global batch)``: they do not depend on the number of ranks, on the device, or on restarts.

    Args:
        crop_padding: pixels of black around an image, from which a crop of its own size is taken.
        flip: mirror half of the images.
        seed: of the random numbers.

    Raises:
        ValueError: if ``crop_padding`` is negative.
    """

    def __init__(self, *, crop_padding: int, flip: bool, seed: int) -> None:
        if crop_padding < 0:
            raise ValueError(f"crop_padding={crop_padding}: must be at least 0")
        self.crop_padding = crop_padding
        self.flip = flip
        self.seed = seed

    def __call__(self, batch: Batch, place: Slice) -> Batch:
        """Change the images of a training batch."""
        return batch._replace(images=self.change(batch.images, place))

    def change(self, images: Tensor, place: Slice) -> Tensor:
        """Change images, which are the slice ``place`` of a global batch.

        Shape:
            images ``[B, C, H, W]`` of any dtype, to the same.
        """
        if not (self.crop_padding or self.flip) or not len(images):
            return images
        numbers = torch.rand(place.global_size, 3, generator=place.generator(self.seed))
        numbers = numbers[place.start :][: len(images)].to(images.device, non_blocking=True)
        count, channels, height, width = images.shape
        padding = self.crop_padding
        shifts = (numbers[:, :2] * (2 * padding + 1)).long()  # [B, 2], from 0 to 2 * padding
        top, left = shifts.unbind(1)
        image = torch.arange(count, device=images.device)
        padded = F.pad(images, (padding, padding, padding, padding)).contiguous()
        if self.flip:
            # Behind the images come their mirror images. Each crop is from one or the other.
            mirrored = numbers[:, 2] < 0.5
            padded = torch.cat([padded, padded.flip(3)])
            image = torch.where(mirrored, image + count, image)
            left = torch.where(mirrored, 2 * padding - left, left)
        # A row of a crop is a window into the memory of the images. index_select copies whole
        # windows; indexing would copy pixel by pixel, which takes twenty times as long.
        image_stride, channel_stride, row_stride, _ = padded.stride()
        corner = image * image_stride + top * row_stride + left  # [B]
        channel = torch.arange(channels, device=images.device) * channel_stride
        row = torch.arange(height, device=images.device) * row_stride
        starts = corner[:, None, None] + channel[:, None] + row  # [B, C, H]
        windows = padded.flatten().unfold(0, width, 1)  # a view
        return windows.index_select(0, starts.flatten()).view(images.shape)
