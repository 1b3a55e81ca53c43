"""What ``config.yaml`` holds of a hyperparameter, whatever its type: plain values, by content.

Numbers, texts, lists and dictionaries stay what they are. Any other object is a group of keys: its
``class``, and what it holds, as the heap reads it::

    setting:
      class: __main__.Settings
      loss_weight: 1.0

The same value gives the same description in every process. So nothing here uses a hash, an address
or the order of a set.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import logging
import math
import re
import types
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.heap.kinds import (
    classes_of,
    kind_of,
    read_attributes,
    read_class,
    read_function,
    read_partial,
)

CLASS = "class"
MAX_ITEMS = 64  # of a tensor or an array whose values are listed; of more there is a digest
MAX_TEXT = 20_000  # characters of an object that is described whole; of more there is a digest
MAX_TEXT_OF_MODULE = 2_000  # the same of a network: nobody reads the settings of hundreds of layers
MAX_VISITS = 20_000  # of objects within one hyperparameter: a data set may hold millions
MAX_DEPTH = 32
MAX_BITS = 4096  # of a whole number: Python does not write much longer ones as decimals
PLAIN = type(None), bool, int, float, str
LIVE = "lightning.", "pytorch_lightning.", "samestep.", "torch._C", "random", "numpy.random"
"""Modules of objects that change while a run trains, such as the Trainer, or with each start."""
ADDRESS = re.compile("0x[0-9a-fA-F]{8,}")


def describe(value: Any) -> Any:
    """The value as plain containers that YAML can hold, alike in every process."""
    return _Description().of(value)


class _Description:
    """Describes one value, and all that it holds."""

    def __init__(self) -> None:
        self._num_left = MAX_VISITS
        self._around: list[int] = []  # the objects that hold the one that is described

    def of(self, value: Any) -> Any:
        if issubclass(type(value), PLAIN):
            return plain(value)
        kind = full_name(type(value))
        self._num_left -= 1
        # An object may hold itself, such as a node of a tree that knows the one above it.
        is_within_itself = id(value) in self._around
        if is_within_itself or self._num_left < 0 or len(self._around) > MAX_DEPTH:
            return {CLASS: kind}
        self._around.append(id(value))
        # Reading an object of the user's may raise anything.
        try:
            return self._of_any(value, kind)
        except Exception:
            return {CLASS: kind}
        finally:
            self._around.pop()

    def _of_any(self, value: Any, kind: str) -> Any:
        if isinstance(value, np.generic):
            # A long double has no equal among Python's numbers.
            return self.of(str(value) if isinstance(value, np.longdouble) else value.item())
        if isinstance(value, PurePath):
            return plain(str(value))
        if isinstance(value, Mapping):
            return self._of_items(value, value)
        if isinstance(value, tuple | MutableSequence):
            # Also OmegaConf's, and a named tuple.
            return [*self._of_items(value, range(len(value))).values()]
        if isinstance(value, Namespace):
            return self._of_items(vars(value), vars(value))
        if isinstance(value, Set):
            # The order of a set of texts is another in each process.
            return {CLASS: kind, "items": sorted(map(self.of, value), key=to_text)}
        contents = contents_of(value)
        return shorten({CLASS: kind, **self._of_items(contents, contents)}, value)

    def _of_items(self, container: Any, keys: Iterable[Any]) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for key in keys:
            try:
                item = container[key]
            # OmegaConf raises for a value that is missing, ``???``, or refers to nothing.
            except Exception as error:
                item = f"<{type(error).__name__}>"
            name = self.of(key)
            if not isinstance(name, str):
                name = to_text(name)
            # 1 and "1" are two keys.
            described[repr(name) if name in described else name] = self.of(item)
        return described


def plain(value: Any) -> Any:
    """The value as one of Python's own type, if it is of a subclass, such as an ``IntEnum``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # The name of a file may have bytes that are no text.
        return str.__str__(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        number = int(value)
        return hex(number) if number.bit_length() > MAX_BITS else number
    return float(value)


def full_name(kind: Any) -> str:
    """The name of a class or a function, with its module."""
    # Not every callable of NumPy has a __qualname__.
    name = getattr(kind, "__qualname__", None) or kind.__name__
    module = getattr(kind, "__module__", None) or "builtins"
    return str(name) if module == "builtins" else f"{module}.{name}"


def shorten(described: dict[str, Any], value: Any) -> dict[str, Any]:
    """The description of an object, or its class and a digest if it is too long to be read."""
    text = to_text(described)
    if len(text) <= (MAX_TEXT_OF_MODULE if isinstance(value, nn.Module) else MAX_TEXT):
        return described
    return {CLASS: described[CLASS], "digest": digest_of(text.encode())}


def to_text(described: Any) -> str:
    """A description in one line, the same for the same value."""
    return json.dumps(described, sort_keys=True)


def digest_of(content: bytes) -> str:
    """The first characters of the SHA-256 of these bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


# -- What an object holds --------------------------------------------------------------------------


def contents_of(value: Any) -> dict[str, Any]:
    """What makes an object what it is, by names."""
    for kinds, read in CONTENTS.items():
        if isinstance(value, kinds):
            return read(value)
    return of_function(value) if callable(value) and hasattr(value, "__name__") else of_any(value)


def of_numbers(numbers: Any) -> dict[str, Any]:
    """The type of a tensor or an array, and its values; of many the shape and a digest."""
    dtype, shape = str(numbers.dtype), list(numbers.shape)
    if isinstance(numbers, Tensor):
        if numbers.is_meta:
            # It has no values.
            return {"dtype": dtype, "shape": shape}
        numbers = numbers.detach().cpu().to_dense()
    # The bytes of objects are addresses.
    if math.prod(shape) <= MAX_ITEMS or dtype == "object":
        return {"dtype": dtype, "values": numbers.tolist()}
    if isinstance(numbers, Tensor):
        # NumPy has no bfloat16, but all values are bytes.
        numbers = numbers.flatten().view(torch.uint8).numpy()
    return {"dtype": dtype, "shape": shape, "digest": digest_of(numbers.tobytes())}


def of_class(kind: type) -> dict[str, Any]:
    """The name of a class, and the values that it holds itself: ``class Config: lr = 0.1``."""
    # What networks hold is no choice of the user's.
    is_read = not issubclass(kind, nn.Module | enum.Enum)
    return {"name": full_name(kind), **(values_of([kind]) if is_read else {})}


def values_of(kinds: Iterable[type]) -> dict[str, Any]:
    """The public plain values in the bodies of classes."""
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, item in read_class(kind).items():
            if isinstance(item, (*PLAIN, tuple, list, dict)) and not name.startswith("_"):
                found.setdefault(name, item)
    return found


def of_module(module: nn.Module) -> dict[str, Any]:
    """The settings of a network and of its layers; not its weights, which training changes."""
    settings: dict[str, Any] = {}
    # A compiled module holds its compiler, and the original as its only child.
    if not type(module).__module__.startswith("torch._"):
        for name, item in vars(module).items():
            # Private names are torch's: hooks, parameters, what was compiled.
            if not name.startswith("_") and name != "training" and not isinstance(item, Tensor):
                settings[name] = item
    if next(module.parameters(), None) is None:
        # Of a loss, such as the weights of its terms.
        settings |= module.named_buffers(recurse=False)
    return settings | dict(module.named_children())


def of_function(function: Any) -> dict[str, Any]:
    """The name of a function, and what it holds beside its code; of a lambda also that."""
    described: dict[str, Any] = {"name": full_name(function)}
    owner = getattr(function, "__self__", None)
    # The owner of a function such as ``math.sin`` is its module.
    if owner is not None and not isinstance(owner, types.ModuleType):
        described["self"] = owner
    code = getattr(function, "__code__", None)
    # A function of a module is what its name says, as the class of a model is.
    if code is None or "<" not in function.__qualname__:
        return described
    if code.co_name == "<lambda>":
        described["code"] = code
    return described | read_function(function)


def of_code(code: types.CodeType) -> dict[str, Any]:
    """What a function does: its instructions, which are others for another version of Python."""
    return {"digest": digest_of(code.co_code), "names": code.co_names, "values": code.co_consts}


def of_any(value: Any) -> dict[str, Any]:
    """The attributes of any other object; without any, what ``register`` reads, or it shows."""
    if type(value).__module__.startswith(LIVE):
        return {}
    names = compared_fields(value)
    if names is not None:
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    found = read_attributes(value)
    # What pydantic accepts beyond the fields of a class.
    extra = found.get("__pydantic_extra__")
    if "__pydantic_fields_set__" not in found:
        found = values_of(classes_of(value)) | found
    # Such names belong to Python and to libraries.
    found = {name: item for name, item in found.items() if not name.startswith("__")}
    if found or extra:
        return found | (extra or {})
    kind = kind_of(value)
    if kind is not None and not kind.has_fields:
        return {"value": kind.read(value)}
    # Of dates, decimals, types of tensors and whatever else is not written in Python.
    return {} if ADDRESS.search(repr(value)) else {"value": plain(repr(value))}


def compared_fields(value: Any) -> list[str] | None:
    """The fields that make two objects of a dataclass, or of attrs, different; otherwise None."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.compare]
    fields = getattr(type(value), "__attrs_attrs__", None)
    return None if fields is None else [field.name for field in fields if field.eq]


CONTENTS: dict[Any, Callable[[Any], dict[str, Any]]] = {
    (Tensor, np.ndarray): of_numbers,
    enum.Enum: lambda member: {"name": member.name},
    functools.partial: read_partial,
    types.CodeType: of_code,
    # A logger holds handlers and streams, a module its whole program.
    logging.Logger: lambda logger: {"name": logger.name},
    types.ModuleType: lambda module: {"name": module.__name__},
    type: of_class,
    nn.Module: of_module,
}
"""How an object is read, by its class. The value of a member may only be a number of ``auto``."""
