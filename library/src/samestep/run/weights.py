"""Whether the weights in a checkpoint fit a model; its own ``load_state_dict`` decides."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.errors import ConfigError
from samestep.ranks import compat, forked

TRIAL_S = 60.0  # for an attempt to load weights; an ordinary model never needs one
GROWN = "grown"
"""The key of a checkpoint for what ``find_growth`` finds."""
UNKNOWN = [-1]
"""The shape of a lazy tensor."""
REJECTED = "Error(s) in loading state_dict"  # how an error of torch begins


def explain_loading(trainer: L.Trainer, remedy: str) -> None:
    """Let the strategy say in one message where weights do not fit, and what to do: ``remedy``."""
    strategy: Any = trainer.strategy
    if "load_model_state_dict" in vars(strategy):
        return
    load = strategy.load_model_state_dict

    def load_or_explain(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        make_room(trainer.lightning_module, checkpoint)
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
    make_room(model, checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading)


def read_shapes(model: nn.Module) -> dict[str, Any]:
    """The shapes of what torch saves of a model, by name."""
    return {name: shape_of(tensor) for name, tensor in compat.saved_tensors(model).items()}


def shape_of(tensor: Tensor) -> list[int]:
    """The shape of a tensor; ``UNKNOWN`` until the first batch if it is a lazy one."""
    return UNKNOWN if is_lazy(tensor) else list(tensor.shape)


def find_growth(model: nn.Module, first: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What has grown since training began, which ``make_room`` repeats; clauses about the rest.

    Args:
        model: as it is now.
        first: its shapes when training began.

    Returns:
        The shapes of before, by name: None of a buffer that is new. And what else has changed.
    """
    grown: dict[str, Any] = {}
    now = read_shapes(model)
    others = [f"{name} is gone" for name in sorted(first.keys() - now.keys())]
    # A buffer that is new can be registered before it is loaded; only the program makes layers.
    before = dict.fromkeys(dict(model.named_buffers())) | dict(first)
    for name, shape in now.items():
        if name not in before:
            others.append(f"{name} is new")
        elif before[name] not in (shape, UNKNOWN):
            grown[name] = before[name]
    return grown, others


def make_room(model: L.LightningModule, checkpoint: Mapping[str, Any]) -> None:
    """Let the tensors that had grown have their saved shapes, so that they can be loaded.

    Only where the model has the shape with which the run began: another one is a change of its
    configuration.
    """
    tensors, shapes = compat.saved_tensors(model), read_shapes(model)
    grown, weights = checkpoint.get(GROWN, {}), checkpoint["state_dict"]
    for name in grown.keys() & weights.keys():
        if shapes.get(name) != grown[name]:
            continue
        if name in tensors:
            # In place: other parts of the model, and optimizers, may have the same tensor.
            tensors[name].data = tensors[name].new_empty(weights[name].shape)
            continue
        path, _, attribute = name.rpartition(".")
        empty = torch.empty_like(weights[name], device=model.device)
        # Of a part that is new only the program can make the buffers.
        with suppress(AttributeError):
            model.get_submodule(path).register_buffer(attribute, empty)


def find_unloadable(model: L.LightningModule, checkpoint: dict[str, Any]) -> str | None:
    """Why a model could not load a checkpoint that it has just made, as a message; None if it can.

    Hooks that save the trainable weights only are many, and Lightning finds out when the run is to
    continue. The weights themselves are those that the model has, so to load them changes nothing;
    but hooks of the user may have effects, so that they are called in a fork.
    """
    # First by names and shapes: nearly all models save what they have, and need no attempt.
    misfit = find_misfit(checkpoint.get("state_dict", {}), model)
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
    except forked.ForkError as error:
        # Another error may come from the fork, or a large file may be read there for too long:
        # then nothing is known, and the run must not wait, nor end, because of a check.
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
    expected = read_shapes(model)
    for name, shape in expected.items():
        if name not in weights:
            return f"it has no {name}"
        found = shape_of(weights[name])
        if found != shape and UNKNOWN not in (found, shape):
            return f"{name} has the shape {found} instead of {shape}"
    unknown = sorted(weights.keys() - expected.keys())
    return f"the model has no {unknown[0]}" if unknown else None


def condense(text: str) -> str:
    """The reasons in an error of torch, without its line breaks."""
    _, _, reasons = text.partition("\n")
    return " ".join(reasons.split()).rstrip(".")
