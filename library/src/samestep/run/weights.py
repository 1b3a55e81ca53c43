"""Whether the weights in a checkpoint fit a model; its own ``load_state_dict`` decides."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.errors import ConfigError
from samestep.ranks import compat, forked

TRIAL_S = 60.0  # for an attempt to load weights; an ordinary model never needs one
REJECTED = "Error(s) in loading state_dict"  # how an error of torch begins


def explain_loading(trainer: L.Trainer, remedy: str) -> None:
    """Let the strategy say in one message where weights do not fit, and what to do: ``remedy``."""
    strategy: Any = trainer.strategy
    if "load_model_state_dict" in vars(strategy):
        return
    load = strategy.load_model_state_dict

    def load_or_explain(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Not compared before: a module may load what seems to be too little.
        try:
            load(checkpoint, strict=strict)
        except RuntimeError as error:
            if not str(error).startswith(REJECTED):
                raise
            why = find_reason(checkpoint, trainer.lightning_module, str(error))
            path = trainer.ckpt_path
            raise ConfigError(f"{path} does not fit this model: {why}. {remedy}") from error

    strategy.load_model_state_dict = load_or_explain


def load_into(model: L.LightningModule, checkpoint: dict[str, Any]) -> None:
    """Give a model the weights of a checkpoint as Lightning does: it may save only a part."""
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading)


def find_unloadable(model: L.LightningModule, checkpoint: dict[str, Any]) -> str | None:
    """Why a model could not load a checkpoint that it has just made, as a message; None if it can.

    Hooks that save the trainable weights only are many, and Lightning finds out when the run is to
    continue. The weights themselves are those that the model has, so to load them changes nothing;
    but hooks of the user may have effects, so that they are called in a fork.
    """
    # First by names and shapes: nearly all models save what they have, and need no attempt.
    misfit = find_misfit(checkpoint.get("state_dict") or {}, model)
    if misfit is None:
        return None
    why = try_to_load(model, checkpoint) if can_try(model) else judge(model, misfit)
    if why is None:
        return None
    name = type(model).__name__
    return (
        f"{name} could not load its own checkpoints, so the run could not continue: {why}. Save "
        "all weights in on_save_checkpoint, or restore them in on_load_checkpoint; or set "
        f"self.strict_loading = False in {name}.__init__, if it has the others from elsewhere"
    )


def can_try(model: nn.Module) -> bool:
    """Whether a fork of this process can load weights: a fork has no GPU, and no other ranks."""
    if not forked.can_fork():
        return False
    return all(map(is_whole_on_cpu, [*model.parameters(), *model.buffers()]))


def is_whole_on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory of this process, all of it."""
    return tensor.device.type == "cpu" and not hasattr(tensor, "full_tensor")


def try_to_load(model: L.LightningModule, checkpoint: dict[str, Any]) -> str | None:
    """Load a checkpoint as Lightning does, in a fork; why that fails, or None."""
    try:
        forked.call_in_fork(partial(load_into, model, checkpoint), TRIAL_S)
    except forked.ForkTimeout:
        # A large file may be read there. The run must not wait, nor end, because of a check.
        return None
    except forked.ForkError as error:
        # Another error may come from the fork: then nothing is known.
        _, found, text = str(error).partition(REJECTED)
        if found:
            return find_reason(checkpoint, model, text)
    return None


def judge(model: L.LightningModule, misfit: str) -> str | None:
    """The misfit, unless code of the user may mend it when the checkpoint is loaded."""
    # A method that is there may do the right thing, and to reject what works is worse than to be
    # late.
    if not model.strict_loading:
        return None
    for name in ("on_load_checkpoint", "load_state_dict"):
        if is_overridden(name, model, L.LightningModule):
            return None
    return misfit


def find_reason(checkpoint: Mapping[str, Any], model: nn.Module, text: str) -> str:
    """Why weights do not fit, as a clause; what an error of torch says if it is not found."""
    misfit = find_misfit(checkpoint["state_dict"], model)
    if misfit is None:
        # The module compares more than names and shapes.
        return condense(text)
    return misfit


def find_misfit(weights: Mapping[str, Any], model: nn.Module) -> str | None:
    """The first difference between saved weights and those of a model, as a clause."""
    expected = compat.saved_tensors(model)
    for name, tensor in expected.items():
        if name not in weights:
            return f"it has no {name}"
        # Without a shape until the first batch.
        if is_lazy(tensor) or is_lazy(weights[name]):
            continue
        found = weights[name].shape
        if found != tensor.shape:
            return f"{name} has the shape {list(found)} instead of {list(tensor.shape)}"
    for name in weights:
        if name not in expected:
            return f"the model has no {name}"
    return None


def condense(text: str) -> str:
    """The reasons in an error of torch, without its line breaks."""
    _, _, reasons = text.partition("\n")
    return " ".join(reasons.split()).rstrip(".")
