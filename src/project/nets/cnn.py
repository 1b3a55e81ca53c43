"""A small convolutional net, after LeNet-5 (LeCun et al., 1998)."""

from torch import nn


class CNN(nn.Sequential):
    """Two convolutions, each of which halves the image, and three linear layers."""

    def __init__(
        self, *, num_channels: int, image_size: int, num_classes: int, channels: tuple[int, int]
    ) -> None:
        first, second = channels
        super().__init__(
            *(nn.Conv2d(num_channels, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(second * (image_size // 4) ** 2, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)),
        )
