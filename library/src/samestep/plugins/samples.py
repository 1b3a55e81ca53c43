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
        return take_rows(batch, length, chosen)
    parts = parts_of(batch)
    if parts is None:
        return batch
    is_list = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    has_entries = is_list and len(batch) == length
    # Such as names of files: nothing in them tells one sample from another.
    if has_entries and all(isinstance(part, str | bytes | int | float) for part in batch):
        return batch[chosen]
    try:
        taken = {name: take(part, length, chosen) for name, part in parts.items()}
    except CannotSplit:
        # Such as sequences of different lengths.
        if has_entries:
            return batch[chosen]
        raise
    return with_parts(batch, taken)


def take_rows(tensor: Any, length: int, chosen: slice) -> Any:
    """Some rows of a tensor or an array; all of a number."""
    if not tensor.ndim:
        return tensor
    if tensor.shape[0] != length:
        raise CannotSplit(f"a tensor of shape {tuple(tensor.shape)} in a batch of {length} samples")
    return tensor[chosen]


def parts_of(batch: Any) -> dict[Any, Any] | None:
    """The parts of a list, dictionary or object; None for a number, a text and the like."""
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if isinstance(batch, Mapping):
        return dict(batch)
    if hasattr(batch, "__dict__") and not callable(batch):
        return dict(vars(batch))
    return None


def with_parts(batch: Any, parts: dict[Any, Any]) -> Any:
    """A copy of a list, dictionary or object, with other parts."""
    if hasattr(batch, "_fields"):
        # A named tuple takes its items as separate arguments.
        return type(batch)(*parts.values())
    if isinstance(batch, list | tuple):
        return type(batch)(parts.values())
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
    if isinstance(first, Tensor):
        return join_rows(batches)
    parts = parts_of(first)
    if parts is None or len(batches) == 1:
        return first
    of_batches = list(map(parts_of, batches))
    joined = {name: join([of_one[name] for of_one in of_batches]) for name in parts}  # type: ignore[index]
    return with_parts(first, joined)


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors; of numbers the first one."""
    if not tensors[0].ndim:
        return tensors[0]
    try:
        return torch.cat([*tensors])
    except RuntimeError as error:
        raise CannotSplit(str(error)) from None
