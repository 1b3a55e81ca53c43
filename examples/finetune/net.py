"""A net of torchvision, timm or another library with a new last layer, for fine-tuning."""

from torch import Tensor, nn


class Pretrained(nn.Module):
    """A backbone, and a linear layer in the place of its last one.

    Args:
        backbone: a net of a library; its pretrained weights are loaded later.
        last_layer: name of its last layer, such as ``fc`` or ``classifier.1``, which is removed.
        num_classes: length of the output.

    Shape:
        images ``[B, C, H, W]`` to logits ``[B, num_classes]``.

    Raises:
        ValueError: if the backbone has no such linear layer.
    """

    def __init__(self, *, backbone: nn.Module, last_layer: str, num_classes: int) -> None:
        super().__init__()
        layers = dict(backbone.named_modules())
        last = layers.get(last_layer)
        if not isinstance(last, nn.Linear):
            linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
            raise ValueError(f"last_layer={last_layer}: must be one of {', '.join(linear)}")
        backbone.set_submodule(last_layer, nn.Identity())
        self.backbone = backbone
        self.head = nn.Linear(last.in_features, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[B, num_classes]`` of images ``[B, C, H, W]``."""
        logits: Tensor = self.head(self.backbone(images))
        return logits
