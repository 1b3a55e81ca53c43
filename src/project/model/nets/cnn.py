"""A small convolutional network."""

from torch import Tensor, nn


class CNN(nn.Module):
    """Two convolutions that halve the image, then three linear layers.

    With ``channels=(6, 16)`` it is the small network of PyTorch's CIFAR-10 tutorial, but padded, so
    that it takes images of any size from 4 pixels on.

    Args:
        num_channels: channels of the images.
        image_size: height and width of the images, in pixels.
        num_classes: length of the output.
        channels: after the first and after the second convolution.

    Shape:
        images ``[B, num_channels, image_size, image_size]`` to logits ``[B, num_classes]``.

    Raises:
        ValueError: if ``channels`` are not two positive numbers, or the images are too small.

    Source:
        LeCun et al., Gradient-based learning applied to document recognition, 1998 (LeNet-5).
    """

    def __init__(
        self, *, num_channels: int, image_size: int, num_classes: int, channels: tuple[int, int]
    ) -> None:
        super().__init__()
        if len(channels) != 2 or min(channels) < 1:
            raise ValueError(f"channels={list(channels)}: must be two numbers, each at least 1")
        if image_size < 4:
            raise ValueError(f"image_size={image_size}: must be at least 4")
        first, second = channels
        self.features = nn.Sequential(
            nn.Conv2d(num_channels, first, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(second * (image_size // 4) ** 2, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images ``[B, C, H, W]``."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
