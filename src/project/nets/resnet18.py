"""ResNet-18 for small images (He et al., https://arxiv.org/abs/1512.03385)."""

from torch import Tensor, nn


class ResNet18(nn.Sequential):
    """Four stages of two residual blocks; each stage after the first halves the image."""

    def __init__(self, *, num_channels: int, num_classes: int, width: int) -> None:
        layers = [*conv(num_channels, width, stride=1), nn.ReLU()]
        for old, new, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2)):
            layers += [Block(old * width, new * width, stride), Block(new * width, new * width, 1)]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, num_classes)
        super().__init__(*layers, *head)


class Block(nn.Module):
    """Two convolutions, added to what entered them."""

    def __init__(self, old: int, new: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(*conv(old, new, stride), nn.ReLU(), *conv(new, new, 1))
        self.shortcut = nn.Sequential(*conv(old, new, stride, size=1) if old != new else ())

    def forward(self, features: Tensor) -> Tensor:
        """Features ``[B, new, H / stride, W / stride]``."""
        return nn.functional.relu(self.residual(features) + self.shortcut(features))


def conv(old: int, new: int, stride: int, size: int = 3) -> list[nn.Module]:
    """A convolution and batch normalization."""
    layer = nn.Conv2d(old, new, size, stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(new)]
