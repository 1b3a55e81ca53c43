"""Whether the weights in a checkpoint fit a model; its own ``load_state_dict`` decides."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.errors import ConfigError

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
    return {name: shape_of(tensor) for name, tensor in saved_tensors(model).items()}


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """What torch expects of a ``state_dict``: parameters and persistent buffers, by their names.

    A module's own ``state_dict`` may leave some out. torch 2.15 says in no public attribute which
    buffers are persistent.
    """
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


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
    tensors, shapes = saved_tensors(model), read_shapes(model)
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


def find_reason(checkpoint: Mapping[str, Any], model: nn.Module, text: str) -> str:
    """Why weights do not fit, as a clause; what an error of torch says if it is not found."""
    misfit = find_misfit(checkpoint["state_dict"], model)
    if misfit is None:
        # The module compares more than names and shapes.
        return condense(text)
    return misfit


def find_misfit(weights: Mapping[str, Any], model: nn.Module) -> str | None:
    """The first difference between saved weights and those of a model, as a clause."""
    return next((misfit for _, misfit in find_misfits(weights, model)), None)


def find_misfits(weights: Mapping[str, Any], model: nn.Module) -> Iterator[tuple[str, str]]:
    """The differences between saved weights and those of a model: names, and clauses."""
    expected = read_shapes(model)
    for name, shape in expected.items():
        if name not in weights:
            yield name, f"it has no {name}"
            continue
        found = shape_of(weights[name])
        if found != shape and UNKNOWN not in (found, shape):
            yield name, f"{name} has the shape {found} instead of {shape}"
    for name in sorted(weights.keys() - expected.keys()):
        yield name, f"the model has no {name}"


def condense(text: str) -> str:
    """The reasons in an error of torch, without its line breaks."""
    _, _, reasons = text.partition("\n")
    return " ".join(reasons.split()).rstrip(".")
