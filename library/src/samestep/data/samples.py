"""The samples of a batch of any kind: some of them, or those of several batches together."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class CannotSplit(Exception):
    """A batch that is not made of one entry for each sample."""


def take(batch: Any, length: int, chosen: slice) -> Any:
    """Some samples of a batch of ``length`` samples.

    Raises:
        CannotSplit: if a tensor has not one entry for each sample.
    """
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim and batch.shape[0] != length:
            shape = tuple(batch.shape)
            raise CannotSplit(f"a tensor of shape {shape} in a batch of {length} samples")
        return batch[chosen] if batch.ndim else batch
    if isinstance(batch, list | tuple):
        return take_of_list(batch, length, chosen)
    parts = parts_of(batch)
    if parts is None:
        return batch
    taken = {name: take(part, length, chosen) for name, part in parts.items()}
    return with_parts(batch, taken)


def take_of_list(batch: Any, length: int, chosen: slice) -> Any:
    """Some samples of a list: of its parts, such as inputs and targets, or of its entries."""
    is_named = hasattr(batch, "_fields")
    # Such as names of files: nothing in them tells one sample from another.
    has_values = all(isinstance(part, str | bytes | int | float) for part in batch)
    if len(batch) == length and has_values and not is_named:
        return batch[chosen]
    try:
        parts = [take(part, length, chosen) for part in batch]
    except CannotSplit:
        # Such as sequences of different lengths.
        if len(batch) == length and not is_named:
            return batch[chosen]
        raise
    return type(batch)(*parts) if is_named else type(batch)(parts)


def parts_of(batch: Any) -> dict[Any, Any] | None:
    """The parts of a dictionary or object; None for a number, a text and the like."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if hasattr(batch, "__dict__") and not callable(batch):
        return dict(vars(batch))
    return None


def with_parts(batch: Any, parts: dict[Any, Any]) -> Any:
    """A copy of a dictionary or object, with other parts."""
    copied = copy.copy(batch)
    if isinstance(batch, Mapping):
        for name, part in parts.items():
            copied[name] = part
    else:
        vars(copied).update(parts)
    return copied


def join(batches: Sequence[Any]) -> Any:
    """One batch with the samples of several.

    Raises:
        CannotSplit: if their shapes do not fit.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        try:
            return torch.cat(list(batches)) if first.ndim else first
        except RuntimeError as error:
            raise CannotSplit(str(error)) from None
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(join, zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(map(join, zip(*batches, strict=True)))
    parts = parts_of(first)
    if parts is None:
        return first
    joined = {name: join([parts_of(batch)[name] for batch in batches]) for name in parts}  # type: ignore[index]
    return with_parts(first, joined)
