"""What is done to a whole batch of images before the net sees it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.data.sampler import Slice, generator


class Normalize(nn.Module):
    """Gives each channel zero mean and unit variance.

    Args:
        mean: of each channel, in units of pixel values scaled to ``[0, 1]``.
        std: of each channel, in the same units.

    Shape:
        uint8 images ``[B, C, H, W]``, to float32 images of the same shape.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        scale = 1 / (255 * torch.tensor([*std]).view(-1, 1, 1))  # [C, 1, 1]
        self.register_buffer("scale", scale)
        self.register_buffer("shift", -255 * torch.tensor([*mean]).view(-1, 1, 1) * scale)

    def forward(self, images: Tensor) -> Tensor:
        """Normalized images."""
        return torch.addcmul(self.shift, images.float(), self.scale)


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
        if not (self.crop_padding or self.flip):
            return images
        numbers = torch.rand(
            place.global_size, 3, generator=generator(self.seed, place.epoch, place.number)
        )
        numbers = numbers[place.start :][: len(images)].to(images.device, non_blocking=True)
        height, width = images.shape[2:]
        padding = self.crop_padding
        shifts = (numbers[:, :2] * (2 * padding + 1)).long()  # [B, 2], from 0 to 2 * padding
        rows = torch.arange(height, device=images.device) + shifts[:, :1]  # [B, H]
        columns = torch.arange(width, device=images.device) + shifts[:, 1:]  # [B, W]
        if self.flip:
            mirrored = (numbers[:, 2] < 0.5).unsqueeze(1)
            columns = torch.where(mirrored, columns.flip(1), columns)
        padded = F.pad(images, (padding, padding, padding, padding))
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        cropped = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2).contiguous()  # [B, H, W, C] to [B, C, H, W]
