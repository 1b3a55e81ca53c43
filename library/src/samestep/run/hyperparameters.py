"""What ``config.yaml`` holds of a hyperparameter, whatever its type: plain values, by content.

Numbers, texts, lists and dictionaries stay what they are. Any other object is a group of keys: its
``class``, and the values that make it what it is::

    setting:
      class: __main__.Settings
      loss_weight: 1.0

The same value gives the same description in every process. So nothing here uses a hash, an address
or the order of a set.
"""

import ast
import dataclasses
import enum
import functools
import hashlib
import json
import linecache
import logging
import re
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLASS = "class"
MAX_ITEMS = 64  # of a tensor or an array whose values are listed; of more there is a digest
MAX_TEXT = 20_000  # characters of an object that is described whole; of more there is a digest
MAX_TEXT_OF_MODULE = 2_000  # the same of a network: nobody reads the settings of hundreds of layers
MAX_VISITS = 20_000  # of objects within one hyperparameter: a data set may hold millions
MAX_DEPTH = 32
MAX_BITS = 4096  # of a whole number: Python does not write much longer ones as decimals
PLAIN = (type(None), bool, int, float, str)
LIVE = ("lightning.", "pytorch_lightning.", "samestep.")
"""Modules whose objects refer to the Trainer, and change while it trains."""
ADDRESS = re.compile("0x[0-9a-fA-F]{8,}")


def describe(value: Any) -> Any:
    """The value as plain containers that YAML can hold, alike in every process."""
    return _Description().of(value)


def full_name(kind: Any) -> str:
    """The name of a class or a function, with its module."""
    # Not every callable of NumPy has a __qualname__.
    name = getattr(kind, "__qualname__", None) or kind.__name__
    module = getattr(kind, "__module__", None) or "builtins"
    return str(name) if module == "builtins" else f"{module}.{name}"


class _Description:
    """Describes one value, and all that it holds."""

    def __init__(self) -> None:
        self._num_visits = 0
        self._around: list[int] = []  # the objects that hold the one that is described

    def of(self, value: Any) -> Any:
        kind = full_name(type(value))
        self._around.append(id(value))
        # Reading an object of the user's may raise anything.
        try:
            return self._of_any(value, kind)
        except Exception:
            return {CLASS: kind}
        finally:
            self._around.pop()

    def _of_any(self, value: Any, kind: str) -> Any:
        if isinstance(value, PLAIN):
            return plain(value)
        self._num_visits += 1
        is_too_much = self._num_visits > MAX_VISITS or len(self._around) > MAX_DEPTH
        # An object may hold itself, such as a node of a tree that knows the one above it.
        if is_too_much or self._around.count(id(value)) > 1:
            return {CLASS: kind}
        describe_container = find_by_kind(CONTAINERS, value)
        if describe_container is not None:
            return describe_container(self, value)
        return shorten({CLASS: kind, **self._content_of(value)}, value)

    def of_items(self, items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for key, item in items:
            name = self.of(key)
            if not isinstance(name, str):
                name = to_text(name)
            # 1 and "1" are two keys.
            if name in described:
                name = repr(name)
            described[name] = self.of(item)
        return described

    def _content_of(self, value: Any) -> dict[str, Any]:
        content_of = find_by_kind(CONTENTS, value)
        if content_of is not None:
            described: dict[str, Any] = content_of(self, value)
            return described
        if callable(value) and hasattr(value, "__name__"):
            return of_function(self, value)
        return of_attributes(self, value)


def find_by_kind(table: Mapping[Any, Any], value: Any) -> Any:
    """The first entry of a table by kinds that has the kind of this value; None if none has."""
    for kinds, entry in table.items():
        if isinstance(value, kinds):
            return entry
    return None


def to_python(value: np.generic) -> Any:
    """The value of NumPy as one of Python's types."""
    item = value.item()
    # A long double has no equal among Python's numbers.
    if isinstance(item, np.generic):
        return str(value)
    return item


def plain(value: Any) -> Any:
    """The value as one of Python's own type, if it is of a subclass, such as an ``IntEnum``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # The name of a file may have bytes that are no text.
        return str.__str__(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        number = int(value)
        if number.bit_length() > MAX_BITS:
            return hex(number)
        return number
    return float(value)


def read_items(container: Any, keys: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The items of a container with these keys."""
    for key in keys:
        try:
            item = container[key]
        # OmegaConf raises for a value that is missing, ``???``, or refers to nothing.
        except Exception as error:
            item = f"<{type(error).__name__}>"
        yield key, item


def shorten(described: dict[str, Any], value: Any) -> dict[str, Any]:
    """The description of an object, or its class and a digest if it is too long to be read."""
    text = to_text(described)
    longest = MAX_TEXT
    if isinstance(value, nn.Module):
        longest = MAX_TEXT_OF_MODULE
    if len(text) <= longest:
        return described
    return {CLASS: described[CLASS], "digest": digest_of(text.encode())}


def to_text(described: Any) -> str:
    """A description in one line, the same for the same value."""
    return json.dumps(described, sort_keys=True)


def digest_of(content: bytes) -> str:
    """The first characters of the SHA-256 of these bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


# -- What has no class in the description: it was always written so -------------------------------


def of_number(inner: _Description, value: np.generic) -> Any:
    """A number, text or time of NumPy as one of Python."""
    return inner.of(to_python(value))


def of_path(inner: _Description, path: PurePath) -> Any:
    """A path as text."""
    return plain(str(path))


def of_namespace(inner: _Description, namespace: Namespace) -> dict[str, Any]:
    """What argparse gives, as a group of keys."""
    return inner.of_items(vars(namespace).items())


def of_mapping(inner: _Description, mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """A group of keys."""
    return inner.of_items(read_items(mapping, mapping))


def of_sequence(inner: _Description, items: Sequence[Any]) -> list[Any]:
    """A list: also for OmegaConf's, and for a named tuple."""
    described = []
    for _, item in read_items(items, range(len(items))):
        described.append(inner.of(item))
    return described


CONTAINERS: dict[Any, Any] = {
    np.generic: of_number,
    PurePath: of_path,
    Namespace: of_namespace,
    Mapping: of_mapping,
    (tuple, MutableSequence): of_sequence,
}


# -- What an object holds, by its kind -------------------------------------------------------------


def of_tensor(inner: _Description, tensor: Tensor) -> dict[str, Any]:
    """The type of a tensor, and its values; of many the shape and a digest."""
    described: dict[str, Any] = {"dtype": str(tensor.dtype)}
    if tensor.is_meta:
        # It has no values.
        described["shape"] = list(tensor.shape)
    elif tensor.numel() > MAX_ITEMS:
        described["shape"] = list(tensor.shape)
        # NumPy has no bfloat16, but all values are bytes.
        content = to_dense(tensor).contiguous().reshape(-1).view(torch.uint8)
        described["digest"] = digest_of(content.numpy().tobytes())
    else:
        described["values"] = to_dense(tensor).tolist()
    return described


def to_dense(tensor: Tensor) -> Tensor:
    """The values as ordinary numbers, in the memory of this process."""
    dense = tensor.detach().cpu()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.is_quantized:
        dense = dense.dequantize()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense


def of_array(inner: _Description, array: Any) -> dict[str, Any]:
    """The type of an array, and its values; of many the shape and a digest."""
    described: dict[str, Any] = {"dtype": str(array.dtype)}
    if array.size <= MAX_ITEMS:
        return described | {"values": inner.of(array.tolist())}
    described["shape"] = list(array.shape)
    # The bytes of objects are addresses.
    if not array.dtype.hasobject:
        described["digest"] = digest_of(np.ascontiguousarray(array).tobytes())
    return described


def of_enum(inner: _Description, member: enum.Enum) -> dict[str, Any]:
    """The name of the member. Its value may only be a number that ``auto`` has given."""
    return {"name": member.name}


def of_set(inner: _Description, values: Set[Any]) -> dict[str, Any]:
    """The values in an order of their own: that of a set of texts is another in each process."""
    return {"items": sorted(map(inner.of, values), key=to_text)}


def of_partial(inner: _Description, value: functools.partial[Any]) -> dict[str, Any]:
    """The function and the arguments that it has already."""
    parts = {"function": value.func, "args": value.args, "keywords": value.keywords}
    return inner.of_items(parts.items())


def of_named(inner: _Description, value: Any) -> dict[str, Any]:
    """The name only: a logger holds handlers and streams, a module its whole program."""
    if isinstance(value, logging.Logger):
        return {"name": value.name}
    return {"name": value.__name__}


def of_class(inner: _Description, kind: type) -> dict[str, Any]:
    """The name of a class, and the values that it holds itself: ``class Config: lr = 0.1``."""
    described: dict[str, Any] = {"name": full_name(kind)}
    # What networks hold is no choice of the user's.
    if not issubclass(kind, (nn.Module, enum.Enum)):
        described |= inner.of_items(values_of_class(kind).items())
    return described


def of_module(inner: _Description, module: nn.Module) -> dict[str, Any]:
    """The settings of a network and of its layers; not its weights, which training changes."""
    settings: dict[str, Any] = {}
    # A compiled module holds its compiler, and the original as its only child.
    if not type(module).__module__.startswith("torch._"):
        settings |= settings_of_layer(module)
    if next(module.parameters(), None) is None:
        # Of a loss, such as the weights of its terms.
        settings |= module.named_buffers(recurse=False)
    settings |= module.named_children()
    return inner.of_items(settings.items())


def settings_of_layer(module: nn.Module) -> dict[str, Any]:
    """The public attributes of one layer that are not learned."""
    settings: dict[str, Any] = {}
    for name, item in vars(module).items():
        # Private names are torch's: hooks, parameters, what was compiled.
        if name.startswith("_") or name == "training":
            continue
        if not isinstance(item, Tensor):
            settings[name] = item
    return settings


CONTENTS: dict[Any, Any] = {
    Tensor: of_tensor,
    np.ndarray: of_array,
    enum.Enum: of_enum,
    Set: of_set,
    functools.partial: of_partial,
    (logging.Logger, types.ModuleType): of_named,
    type: of_class,
    nn.Module: of_module,
}


def of_function(inner: _Description, function: Any) -> dict[str, Any]:
    """The name of a function, and what it holds beside its code; of a lambda its expression."""
    described: dict[str, Any] = {"name": full_name(function)}
    owner = getattr(function, "__self__", None)
    # The owner of a function such as ``math.sin`` is its module.
    if owner is not None and not isinstance(owner, types.ModuleType):
        described["self"] = inner.of(owner)
    code = getattr(function, "__code__", None)
    # A function of a module is what its name says, as the class of a model is.
    if code is None or "<" not in function.__qualname__:
        return described
    if code.co_name == "<lambda>":
        described["code"] = expression_of(code)
    for name in ("__defaults__", "__kwdefaults__"):
        values = getattr(function, name)
        if values:
            described[name.strip("_")] = inner.of(values)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        described[name] = inner.of(cell.cell_contents)
    return described


def expression_of(code: types.CodeType) -> str:
    """The expression of a lambda, as Python writes it; where its file is gone, a digest."""
    starts, ends = [], []
    for line, end_line, column, end_column in code.co_positions():
        # The first instruction has no text, and stands at the beginning of a line.
        if line and end_line and column is not None and end_column:
            starts.append((line, column))
            ends.append((end_line, end_column))
    arguments = ", ".join(code.co_varnames[: code.co_argcount])
    try:
        (line, column), (end_line, end_column) = min(starts), max(ends)
        text = linecache.getlines(code.co_filename)[line - 1 : end_line]
        # Columns count bytes.
        lines = [part.encode() for part in text]
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        expression = ast.parse(b"(" + b"".join(lines) + b")", mode="eval")
        return f"lambda {arguments}: {ast.unparse(expression)}"
    except (SyntaxError, ValueError, IndexError):
        return f"lambda {arguments}: {digest_of(code.co_code)}"


def of_attributes(inner: _Description, value: Any) -> dict[str, Any]:
    """The attributes of any other object; without any, what it shows."""
    if type(value).__module__.startswith(LIVE):
        return {}
    attributes = attributes_of(value)
    if attributes:
        return inner.of_items(attributes.items())
    # Of dates, decimals, types of tensors and whatever else is not written in Python.
    shown = repr(value)
    if ADDRESS.search(shown):
        return {}
    return {"value": plain(shown)}


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds by name."""
    names = compared_fields(value)
    if names is not None:
        return read_attributes(value, names)
    found: dict[str, Any] = {}
    if not hasattr(value, "__pydantic_fields__"):
        found |= values_of_class(type(value))
    found |= getattr(value, "__dict__", {})
    found |= slots_of(value)
    # What pydantic accepts beyond the fields of a class.
    found |= getattr(value, "__pydantic_extra__", None) or {}
    for name in list(found):
        # Names such as __pydantic_fields_set__ belong to Python and to libraries.
        if str(name).startswith("__"):
            del found[name]
    return found


def read_attributes(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attributes of these names, as far as they are set."""
    found = {}
    for name in names:
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


def slots_of(value: Any) -> dict[str, Any]:
    """What an object holds in the slots of its type and the types above it."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        # One slot may be written as a text.
        if isinstance(names, str):
            names = [names]
        found |= read_attributes(value, names)
    return found


def compared_fields(value: Any) -> Sequence[str] | None:
    """The fields that make two objects of a dataclass, or of attrs, different; otherwise None."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.compare]
    fields = getattr(type(value), "__attrs_attrs__", None)
    if fields is not None:
        return [field.name for field in fields if field.eq]
    return None


def values_of_class(kind: type) -> dict[str, Any]:
    """The public plain values in the body of a class, and of its bases in the same package."""
    package = kind.__module__.partition(".")[0]
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == package:
            found |= own_values_of(base)
    return found


def own_values_of(kind: type) -> dict[str, Any]:
    """The public plain values in the body of a class."""
    found: dict[str, Any] = {}
    for name, item in vars(kind).items():
        is_value = isinstance(item, (*PLAIN, tuple, list, dict))
        if is_value and not name.startswith("_"):
            found[name] = item
    return found
