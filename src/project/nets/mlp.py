"""A multilayer perceptron."""

from torch import nn


class MLP(nn.Sequential):
    """One hidden layer over the pixels."""

    def __init__(
        self, num_channels: int, image_size: int, num_classes: int, hidden_size: int, dropout: float
    ) -> None:
        hidden = nn.Linear(num_channels * image_size**2, hidden_size)
        output = nn.Linear(hidden_size, num_classes)
        super().__init__(nn.Flatten(), hidden, nn.ReLU(), nn.Dropout(dropout), output)
