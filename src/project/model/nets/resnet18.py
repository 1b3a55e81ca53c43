"""ResNet-18 for small images."""

from torch import Tensor, nn
from torch.nn import functional as F


class ResNet18(nn.Module):
    """Four stages of two residual blocks; each stage after the first halves the image.

    The stem is that of the paper's CIFAR networks: one 3 x 3 convolution, no pooling.

    Args:
        num_channels: channels of the images.
        num_classes: length of the output.
        width: channels of the first stage; each later stage doubles them.

    Shape:
        images ``[B, num_channels, H, W]`` to logits ``[B, num_classes]``.

    Raises:
        ValueError: if ``width`` is below 1.

    Source:
        He et al., Deep residual learning for image recognition, https://arxiv.org/abs/1512.03385.
    """

    def __init__(self, *, num_channels: int, num_classes: int, width: int) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width={width}: must be at least 1")
        self.stem = nn.Sequential(*conv_norm(num_channels, width), nn.ReLU())
        blocks = [ResidualBlock(width, width, stride=1), ResidualBlock(width, width, stride=1)]
        for channels in (width, 2 * width, 4 * width):
            blocks.append(ResidualBlock(channels, 2 * channels, stride=2))
            blocks.append(ResidualBlock(2 * channels, 2 * channels, stride=1))
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images ``[B, C, H, W]``."""
        features: Tensor = self.stages(self.stem(images))  # [B, 8 * width, H / 8, W / 8]
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions, added to what entered them.

    Shape:
        ``[B, in_channels, H, W]`` to ``[B, out_channels, H / stride, W / stride]``.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *conv_norm(in_channels, out_channels, stride=stride),
            nn.ReLU(),
            *conv_norm(out_channels, out_channels),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                *conv_norm(in_channels, out_channels, kernel_size=1, stride=stride)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Features ``[B, out_channels, H / stride, W / stride]``."""
        return F.relu(self.residual(features) + self.shortcut(features))


def conv_norm(
    in_channels: int, out_channels: int, *, kernel_size: int = 3, stride: int = 1
) -> list[nn.Module]:
    """A convolution that keeps the size at stride 1, and batch normalization."""
    padding = kernel_size // 2
    return [
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False),
        nn.BatchNorm2d(out_channels),
    ]
