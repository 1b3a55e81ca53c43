"""Start from pretrained weights, and freeze them for some epochs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from project.model import Classifier
from samestep import ConfigError

PREFIXES = ("", "net.backbone.", "net.", "backbone.", "module.", "model.")  # of names in files


class FinetunedClassifier(Classifier):
    """A ``Classifier`` whose ``net.backbone`` has a highest learning rate of its own."""

    def __init__(self, *, backbone_lr: float, **options: Any) -> None:
        if backbone_lr <= 0:
            raise ValueError(f"backbone_lr={backbone_lr}: must be above 0")
        self.backbone_lr = backbone_lr  # before the optimizer is built
        options["lr_scheduler"] = partial(scale_each_rate, options["lr_scheduler"])
        super().__init__(**options)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The groups of the head, and those of the backbone."""
        backbone = set(self.net.get_submodule("backbone").parameters())
        of_head, of_backbone = [], []
        for group in super().parameter_groups():
            learned = group["params"]
            of_head.append(group | {"params": [p for p in learned if p not in backbone]})
            found = {"params": [p for p in learned if p in backbone], "lr": self.backbone_lr}
            of_backbone.append(group | found)
        return of_head + of_backbone


def scale_each_rate(
    lr_scheduler: Callable[..., LRScheduler], optimizer: Optimizer, **options: Any
) -> LRScheduler:
    """A schedule with the highest rate of each group; it would otherwise have one for all."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler(optimizer, max_lr=rates, **options)


class Finetuning(L.Callback):
    """Loads pretrained weights into ``net.backbone``, and freezes it for the first epochs.

    What is frozen is a function of the epoch, so a run that resumes does not need the file. A
    frozen backbone is in evaluation mode: its batch norm keeps its statistics.

    Args:
        weights: a file (``.pth``, ``.safetensors``, a checkpoint of another run), or an address
            ``https://...``, which torch.hub keeps in its folder; None: random weights.
        frozen_epochs: epochs before the backbone learns too.

    Raises:
        ConfigError: when a run starts, if the weights cannot be read or do not fit.
    """

    def __init__(self, weights: str | None, frozen_epochs: int) -> None:
        if frozen_epochs < 0:
            raise ValueError(f"frozen_epochs={frozen_epochs}: must be at least 0")
        self.weights, self.frozen_epochs = weights, frozen_epochs

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the weights, unless the run resumes with its own."""
        if self.weights and trainer.ckpt_path is None:
            load_weights(pl_module.get_submodule("net.backbone"), self.weights)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Freeze the backbone in the first epochs, or let it learn."""
        is_frozen = trainer.current_epoch < self.frozen_epochs
        backbone = pl_module.get_submodule("net.backbone")
        backbone.requires_grad_(not is_frozen).train(not is_frozen)

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
