"""Start from pretrained weights, and freeze them for some epochs."""

from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from project.model.classifier import ImageClassifier
from samestep import ConfigError

PREFIXES = ("", "net.backbone.", "net.", "backbone.", "module.", "model.")  # of names in files


class FinetunedClassifier(ImageClassifier):
    """An ``ImageClassifier`` whose ``net.backbone`` learns more slowly than the rest.

    Args:
        backbone_lr: learning rate of ``net.backbone``; None: that of the optimizer.
        options: the arguments of ``ImageClassifier``.
    """

    def __init__(self, *, backbone_lr: float | None = None, **options: Any) -> None:
        self.backbone_lr = backbone_lr  # before the optimizer is built
        super().__init__(**options)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The head, and the backbone with its own learning rate."""
        (group,) = super().parameter_groups()
        if self.backbone_lr is None:
            return [group]
        backbone = list(self.net.get_submodule("backbone").parameters())
        others = set(group["params"]) - set(backbone)
        head = [p for p in group["params"] if p in others]
        return [{"params": head}, {"params": backbone, "lr": self.backbone_lr}]


class Finetuning(L.Callback):
    """Loads pretrained weights into a part of the model, and freezes it for the first epochs.

    What is frozen is a function of the epoch, so a run that resumes does not need the file. A
    frozen part is in evaluation mode: its batch norm keeps its statistics.

    Args:
        weights: a file (``.pth``, ``.safetensors``, a checkpoint of another run), or an address
            ``https://...``, which torch.hub keeps in its folder; None: random weights.
        frozen_epochs: epochs before the part learns too.
        part: name of the part in the LightningModule.

    Raises:
        ConfigError: when a run starts, if the weights cannot be read or do not fit.
    """

    def __init__(self, weights: str | None, frozen_epochs: int, part: str = "net.backbone") -> None:
        self.weights = weights
        self.frozen_epochs = frozen_epochs
        self.part = part

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the weights, unless the run resumes with its own."""
        if self.weights and trainer.ckpt_path is None:
            load_weights(pl_module.get_submodule(self.part), self.weights)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Freeze the part in the first epochs, or let it learn."""
        is_frozen = trainer.current_epoch < self.frozen_epochs
        part = pl_module.get_submodule(self.part)
        part.requires_grad_(not is_frozen)
        part.train(not is_frozen)

    # At both: a run that resumes within an epoch does not start that epoch again.
    on_train_epoch_start = on_train_start


def load_weights(part: nn.Module, weights: str) -> None:
    """Load a file or an address into ``part``; other layers in it, such as a head, are ignored.

    Raises:
        ConfigError: if they cannot be read, or lack one of its tensors.
    """
    try:
        found = read_weights(weights)
    except Exception as error:
        raise ConfigError(f"weights={weights}: cannot be read: {error}") from error
    # Older files lack this counter of batch norm, which no output depends on.
    own = [name for name in part.state_dict() if not name.endswith("num_batches_tracked")]
    # The prefix depends on who saved the file: the one that most names match is right.
    prefix = max(PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in found for name in own))
    if missing := [name for name in own if f"{prefix}{name}" not in found]:
        raise ConfigError(
            f"weights={weights}: lack {', '.join(missing[:3])}; they do not fit "
            f"{type(part).__name__}"
        )
    try:
        part.load_state_dict({name: found[f"{prefix}{name}"] for name in own}, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"weights={weights}: do not fit: {reason}") from error


def read_weights(weights: str) -> dict[str, Tensor]:
    """The tensors of a file or an address by their names; nothing in it is executed."""
    if weights.startswith("https://"):
        options: Any = {"map_location": "cpu", "weights_only": True}
        state: Any = torch.hub.load_state_dict_from_url(weights, **options)
    elif weights.endswith(".safetensors"):
        state = load_file(weights)
    else:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    tensors: dict[str, Tensor] = state.get("state_dict", state)
    return tensors
