"""A digest of a batch of any kind, to see whether two batches hold the same samples."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_ITEMS = 512  # of a tensor that are read, spread over all of it
MAX_VALUES = 256  # of a batch that are visited: lists, dicts, objects and what they hold
MAX_DEPTH = 6
SAME_BYTES = {1: torch.uint8, 2: torch.int16}
"""Types of NumPy for tensors whose type it does not have, such as bfloat16, by their sizes."""


class BatchDigest:
    """A checksum of the tensors, arrays and numbers in a batch, in the order in which they stand.

    It reads a part of each, because it is made in each step. Text is left out: it may hold paths
    and times. So is what a GPU holds, which the process would have to wait for.
    """

    def __init__(self, batch: Any) -> None:
        self.checksum = 0
        """0 if nothing was found."""
        self._num_left = MAX_VALUES
        # A batch can be an object of any class, whose attributes may raise anything.
        try:
            self._add(batch, 0)
        except Exception:
            self.checksum = 0

    def _add(self, value: Any, depth: int) -> None:
        self._num_left -= 1
        if self._num_left < 0 or depth > MAX_DEPTH:
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            self._add_array(value)
        elif isinstance(value, int | float | np.generic):
            self._add_bytes(repr(value).encode())
        else:
            for item in items_of(value):
                self._add(item, depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return
        tensor = tensor.detach()
        try:
            array = tensor.numpy()
        except TypeError:
            array = tensor.view(SAME_BYTES[tensor.element_size()]).numpy()
        self._add_array(array)

    def _add_array(self, array: Any) -> None:
        # The bytes of objects are addresses.
        if array.dtype.hasobject:
            return
        step = 1 + array.size // MAX_ITEMS
        # Flattening an array that is not contiguous would copy all of it.
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        self._add_bytes(flat[::step].tobytes())

    def _add_bytes(self, content: bytes) -> None:
        self.checksum = zlib.crc32(content, self.checksum) or 1


def items_of(value: Any) -> Iterable[Any]:
    """What a list, a dict or an object holds, such as a dataclass or a graph of PyG."""
    if isinstance(value, list | tuple):
        # All of a long list, such as one number for each sample, would take too long.
        return value[:: 1 + len(value) // MAX_VALUES]
    if isinstance(value, dict):
        # Not its own method: a subclass may load its values only when they are asked for.
        return dict.values(value)
    if isinstance(value, str | bytes):
        return []
    items = [*getattr(value, "__dict__", {}).values()]
    for name in getattr(type(value), "__slots__", ()):
        items.append(getattr(value, name, None))
    return items
