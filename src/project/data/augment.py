"""What is done to a whole batch of images before the net sees it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.data.sampler import Slice
from samestep.data.seeds import generator


class Normalize(nn.Module):
    """Gives each channel zero mean and unit variance.

    Args:
        mean: of each channel, in units of pixel values scaled to ``[0, 1]``.
        std: of each channel, in the same units.
        image_size: height and width of the images, in pixels.

    Shape:
        uint8 images ``[B, C, image_size, image_size]``, to float32 images of the same shape.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], image_size: int) -> None:
        super().__init__()
        scale = 1 / (255 * torch.tensor([*std]).view(-1, 1, 1))  # [C, 1, 1]
        shift = -255 * torch.tensor([*mean]).view(-1, 1, 1) * scale
        # As large as an image: with one number per channel, torch takes its slow loop on a CPU.
        shape = len(scale), image_size, image_size
        self.register_buffer("scale", scale.expand(shape).contiguous())
        self.register_buffer("shift", shift.expand(shape).contiguous())

    def forward(self, images: Tensor) -> Tensor:
        """Normalized images."""
        pixels = images.to(torch.float32, copy=True)
        # In place, no second batch is allocated.
        return torch.addcmul(self.shift, pixels, self.scale, out=pixels)


class Augment:
    """Shifts each image by a few pixels, and mirrors half of them left to right.

    The numbers drawn for an image are a pure function of ``(seed, epoch, batch, position in
    the global batch)``: they do not depend on the number of ranks, on the device, or on restarts.

    Args:
        crop_padding: pixels of black around an image, from which a crop of its own size is drawn.
        flip: mirror half of the images.
        seed: of the numbers drawn.

    Shape:
        images ``[B, C, H, W]`` of any dtype, to the same.
    """

    def __init__(self, *, crop_padding: int, flip: bool, seed: int) -> None:
        self.crop_padding = crop_padding
        self.flip = flip
        self.seed = seed

    def __call__(self, images: Tensor, place: Slice) -> Tensor:
        """Change ``images``, which are the slice ``place`` of a global batch."""
        if not (self.crop_padding or self.flip) or not len(images):
            return images
        numbers = torch.rand(
            place.global_size, 3, generator=generator(self.seed, place.epoch, place.number)
        )
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
