"""From the bytes of images to what a net takes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """Gives each channel zero mean and unit variance.

    Args:
        mean: of each channel, in units of pixel values scaled to ``[0, 1]``.
        std: of each channel, in the same units.
        image_size: height and width of the images, in pixels.

    Shape:
        uint8 images ``[B, C, image_size, image_size]``, to floats of the same shape.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, *, mean: Sequence[float], std: Sequence[float], image_size: int) -> None:
        super().__init__()
        scale = 1 / (255 * torch.tensor([*std]).view(-1, 1, 1))  # [C, 1, 1]
        shift = -255 * torch.tensor([*mean]).view(-1, 1, 1) * scale
        # As large as an image: with one number per channel, torch takes its slow loop on a CPU.
        shape = len(scale), image_size, image_size
        self.register_buffer("scale", scale.expand(shape).contiguous(), persistent=False)
        self.register_buffer("shift", shift.expand(shape).contiguous(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Normalized images."""
        pixels = images.to(self.scale.dtype, copy=True)
        # In place, no second batch is allocated.
        return torch.addcmul(self.shift, pixels, self.scale, out=pixels)
