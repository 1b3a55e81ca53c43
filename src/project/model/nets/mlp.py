"""A multilayer perceptron."""

from torch import Tensor, nn


class MLP(nn.Module):
    """One hidden layer over the pixels.

    Args:
        num_channels: channels of the images.
        image_size: height and width of the images, in pixels.
        num_classes: length of the output.
        hidden_size: units of the hidden layer.
        dropout: share of hidden units left out of each training step, 0 to 1.

    Shape:
        images ``[B, num_channels, image_size, image_size]`` to logits ``[B, num_classes]``.

    Raises:
        ValueError: if ``hidden_size`` or ``dropout`` is out of its range.
    """

    def __init__(
        self,
        *,
        num_channels: int,
        image_size: int,
        num_classes: int,
        hidden_size: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"hidden_size={hidden_size}: must be at least 1")
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_channels * image_size**2, hidden_size),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images ``[B, C, H, W]``."""
        logits: Tensor = self.layers(images)
        return logits
