"""Reads the values of attributes into what any checkpoint can keep, and writes them back.

What was read consists of numbers, text, lists and tuples, which ``torch.load`` accepts with
``weights_only=True``. Tensors and arrays are put elsewhere, and what says where stands for them.
"""

import ast
import random
import sys
import zlib
from abc import ABC
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial, reduce
from io import IOBase
from itertools import chain, count, islice, repeat
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Generic, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.ranks.sharded import class_of

FRAMEWORKS = {"torch", "lightning", "samestep", "torchmetrics", "omegaconf"}
LIBRARIES = FRAMEWORKS | sys.stdlib_module_names
NUM_OF_OTHERS = 1_000  # items of an object that cannot be brought back
NUM_ENDS = 64  # items at each end of a list that is too long
MAX_DEPTH = 8  # lists in objects in lists...
PLAIN = {type(None), bool, int, float, str}
ITEMS = (list, tuple, deque, set, frozenset)
NUMBERS = count()
UNTRACKED = ("untracked", None)  # no state, or a checkpoint holds it elsewhere
Array = np.ndarray[Any, Any] | np.generic
MISSING = object()  # there is no value that could be changed
NO_STORAGE = -1  # in memory
PLAIN_PARENTS = {*Namespace.__mro__, ABC, Generic, Protocol, tuple}

GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""How the state of each kind of generator of random numbers is read and written."""


class CannotDecodeError(Exception):
    """Only the program itself can make such an object anew."""


class Encoder:
    """Reads one value.

    Args:
        ignored: ids, and places in memory, of what a checkpoint holds elsewhere.
        put: gets each tensor and array; what it returns stands for it.
        limit: no more items are read.
        first: ids of what existed when training began. Such objects are written in place, because
            other parts of the program may share them.
    """

    def __init__(
        self,
        ignored: Collection[int],
        put: Callable[[Any], Any],
        limit: int,
        first: Collection[int] = (),
    ) -> None:
        self.ignored, self.put, self.first = ignored, put, first
        self.limit = self._num_left = limit
        self.is_whole = True
        """Whether ``decode`` brings back all that was read."""
        self.objects: set[int] = set()
        """The ids of what was found in it."""

    def encode(self, value: Any, depth: int = 0) -> Any:
        """What ``decode`` needs."""
        self._num_left -= 1
        if type(value) in PLAIN:
            return value
        if isinstance(value, complex | bytes):
            return "literal", repr(value)
        if isinstance(value, Enum):
            return "member", name_of(type(value)), value.name
        if not isinstance(value, tuple | frozenset | np.generic):
            self.objects.add(id(value))
        if id(value) in self.ignored or storage_of(value) in self.ignored:
            return UNTRACKED
        if depth > MAX_DEPTH or self._num_left < 0:
            return self._give_up()
        if isinstance(value, Tensor):
            return self._encode_tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_array(value)
        if isinstance(value, (*ITEMS, dict)):
            return self._encode_items(value, depth + 1)
        return self._encode_object(value, depth + 1)

    def _encode_tensor(self, tensor: Tensor) -> Any:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_meta:
            return self._give_up()
        is_learned = tensor.requires_grad and tensor.is_leaf
        return (
            "tensor", id(tensor) in self.first, str(tensor.dtype)[6:], [*tensor.shape],
            tensor.device.type == "cpu", is_learned, self.put(tensor),
        )  # fmt: skip

    def _encode_array(self, array: Array) -> Any:
        if array.dtype.hasobject or array.dtype.names:
            return self._give_up()
        return (
            "array", id(array) in self.first, array.dtype.str, [*array.shape],
            isinstance(array, np.ndarray), self.put(array),
        )  # fmt: skip

    def _encode_items(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            pairs = self._ends(value.items())
            items = [[self.encode(key, depth), self.encode(item, depth)] for key, item in pairs]
        else:
            items = [self.encode(item, depth) for item in self._ends(value)]
        size = getattr(value, "maxlen", None), len(value)
        return "items", id(value) in self.first, name_of(class_of(value)), *size, items

    def _encode_object(self, value: Any, depth: int) -> Any:
        kind = class_of(value)
        if isinstance(value, tuple(GENERATORS)):
            state_of, _ = functions_of(value)
            return "generator", self._encode_apart(state_of(value))
        if isinstance(value, nn.Module | Optimizer | LRScheduler):
            # A net in a list or a callback, an optimizer that Lightning does not know.
            return "state_dict", self._encode_apart(value.state_dict())
        if isinstance(value, FunctionType | MethodType | partial):
            self._note_objects(value)
            return UNTRACKED
        if is_of_library(value) and kind not in (Namespace, SimpleNamespace):
            if not isinstance(value, Iterator) or isinstance(value, IOBase):
                return UNTRACKED
            # Nobody can see where it is, but whoever keeps one takes its items one by one.
            self.is_whole = False
            return "iterator", next(NUMBERS)
        if not is_plain_class(kind):
            self.is_whole = False
            self._num_left = min(self._num_left, NUM_OF_OTHERS)
        attributes = attributes_of(value).items()
        items = [[name, self.encode(one, depth)] for name, one in attributes]
        return "object", id(value) in self.first, name_of(kind), items

    def _give_up(self) -> tuple[str, None]:
        self.is_whole = False
        return UNTRACKED

    def _encode_apart(self, state: Any) -> Any:
        """Read what was made for this moment only, so that nothing else can share it."""
        encoder = Encoder(self.ignored, self.put, self.limit)
        read = encoder.encode(state)
        self.is_whole &= encoder.is_whole
        return read

    def _note_objects(self, function: Any) -> None:
        """Note what a function, such as one of a data set, may change when it is called."""
        if isinstance(function, partial):
            self.objects |= {id(one) for one in (*function.args, *function.keywords.values())}
            function = function.func
        self.objects.add(id(getattr(function, "__self__", None)))
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # it is empty
                self.objects.add(id(cell.cell_contents))

    def _ends(self, items: Collection[Any]) -> Iterable[Any]:
        """The items, or those at both ends of too many."""
        if len(items) <= self.limit:
            return items
        self.is_whole = False
        return [*islice(items, NUM_ENDS), *islice(items, len(items) - NUM_ENDS, None)]


class Packed:
    """Copies of many tensors and arrays in one tensor, which is saved as one."""

    def __init__(self) -> None:
        self._parts = [torch.empty(0, dtype=torch.uint8)]
        self._size = 0

    def put(self, data: Tensor | Array) -> list[int]:
        """Add one; returns where its bytes begin and end."""
        part = bytes_of(data)
        self._parts.append(part)
        self._size += len(part)
        return [self._size - len(part), self._size]

    def joined(self) -> Tensor:
        """All bytes, uint8 ``[bytes]``."""
        return torch.cat(self._parts)


class Decoder:
    """Writes values that were read.

    Args:
        packed: the bytes of their tensors and arrays, uint8 ``[bytes]``.
        device: where tensors are made that were not in the memory of the CPU.
    """

    def __init__(self, packed: Tensor, device: torch.device) -> None:
        self.packed, self.device = packed, device

    def decode(self, value: Any, read: Any) -> Any:
        """What was read; ``value`` itself, changed, if it was changed in place before.

        Raises:
            CannotDecodeError: if there is no ``value`` to be changed, and no other can be made.
        """
        if not isinstance(read, tuple):
            return read
        kind, *rest = read
        if kind in ("tensor", "array", "items", "object"):
            return getattr(self, f"_{kind}")(value, *rest)
        if kind == "literal":
            return ast.literal_eval(rest[0])
        if kind == "member":
            return find_class(rest[0])[rest[1]]  # type: ignore[index]
        if value is MISSING:
            raise CannotDecodeError
        if kind == "generator":
            _, set_state = functions_of(value)
            set_state(value, self.decode(MISSING, rest[0]))
        elif kind == "state_dict":
            value.load_state_dict(self.decode(MISSING, rest[0]))
        return value

    def _bytes_at(self, place: list[int]) -> Tensor:
        # In memory of their own, where the first one has the place that its type needs.
        return self.packed[slice(*place)].clone()

    def _tensor(
        self, value: Any, is_first: bool, dtype: str, shape: list[int], on_cpu: bool,
        is_learned: bool, place: Any,
    ) -> Tensor:  # fmt: skip
        tensor = self._bytes_at(place).view(getattr(torch, dtype)).view(shape)
        if is_first and isinstance(value, Tensor) and value.shape == tensor.shape:
            with torch.no_grad():
                return value.copy_(tensor)
        tensor = tensor.to("cpu" if on_cpu else self.device)
        return tensor.requires_grad_() if is_learned else tensor

    def _array(
        self, value: Any, is_first: bool, dtype: str, shape: list[int], is_array: bool, place: Any
    ) -> Any:
        array = self._bytes_at(place).numpy().view(dtype).reshape(shape)
        if is_first and isinstance(value, np.ndarray) and value.shape == array.shape:
            value[...] = array
            return value
        return array if is_array else array[()]

    def _items(
        self, value: Any, is_first: bool, name: str, maxlen: int | None, length: int, items: Any
    ) -> Any:
        has_same_class = name_of(class_of(value)) == name
        kind: Any = class_of(value) if has_same_class else find_class(name)
        if issubclass(kind, dict):
            before = value if has_same_class else {}
            pairs = [(self.decode(MISSING, key), item) for key, item in items]
            new: Any = {key: self.decode(before.get(key, MISSING), item) for key, item in pairs}
        else:
            is_sorted = has_same_class and not issubclass(kind, set | frozenset)
            live = chain(value if is_sorted else (), repeat(MISSING))
            new = [self.decode(one, item) for one, item in zip(live, items, strict=False)]
        if is_first and has_same_class and not issubclass(kind, tuple | frozenset):
            value.clear()
            value.update(new) if issubclass(kind, dict | set) else value.extend(new)
            return value
        if issubclass(kind, tuple):  # also a named tuple
            return tuple.__new__(kind, new)
        if kind not in (*ITEMS, dict, OrderedDict):
            raise CannotDecodeError
        return deque(new, maxlen) if kind is deque else kind(new)

    def _object(self, value: Any, is_first: bool, name: str, read: Any) -> Any:
        has_same_class = value is not MISSING and name_of(class_of(value)) == name
        before = attributes_of(value) if has_same_class else {}
        if not (is_first and has_same_class):
            value = object.__new__(find_class(name))
        for attribute, item in read:
            # A frozen dataclass too.
            new = self.decode(before.get(attribute, MISSING), item)
            object.__setattr__(value, attribute, new)
        return value


def functions_of(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """What reads the state of a generator, and what writes it."""
    return next(found for kind, found in GENERATORS.items() if isinstance(generator, kind))


def bytes_of(data: Tensor | Array, step: int = 1) -> Tensor:
    """The bytes of each ``step``-th value, uint8 ``[bytes]`` on the CPU."""
    if isinstance(data, Tensor):
        values = data.detach().flatten()[::step].cpu()
        return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    copied = bytearray(data.ravel()[::step].tobytes())
    return torch.from_numpy(np.frombuffer(copied, np.uint8))


def fingerprint(data: Tensor | Array, max_bytes: int) -> int:
    """A number that is another one for other values, of ``max_bytes`` spread over all of them."""
    values: Any = bytes_of(data, max(1, data.nbytes // max_bytes)).numpy()
    return zlib.crc32(values)


def numbers_in(read: Any) -> Iterator[object]:
    """The numbers in a value that was read, and what stands for tensors; not text."""
    if isinstance(read, tuple):
        kind, *_, parts = read
        if kind == "items" and len(parts) < read[-2]:
            yield read[-2]  # the length of a list of which only the ends were read
        yield from [parts] if kind in ("tensor", "array") else numbers_in(parts)
    elif isinstance(read, list):
        for part in read:
            yield from numbers_in(part)
    elif isinstance(read, bool | int | float):
        yield repr(read)


def find_class(name: str) -> type:
    """A class of the program, which has imported it; nothing is called but ``object.__new__``.

    Raises:
        CannotDecodeError: if there is none.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = reduce(getattr, path.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        raise CannotDecodeError from None
    if not isinstance(found, type):
        raise CannotDecodeError
    is_enum = issubclass(found, Enum) and package_of(found) not in LIBRARIES
    if found not in (*ITEMS, dict, OrderedDict) and not is_enum and not is_plain_class(found):
        raise CannotDecodeError
    return found


def is_plain_class(kind: type) -> bool:
    """Whether an object of this class is nothing but its attributes, as far as we can know."""
    return not any(
        package_of(parent) in LIBRARIES and parent not in PLAIN_PARENTS for parent in kind.__mro__
    )


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object, in its ``__slots__`` too."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return in_slots | getattr(value, "__dict__", {})


def name_of(kind: type) -> str:
    """The name of a class by which ``find_class`` finds it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def package_of(kind: type) -> str:
    """The package of a class."""
    return str(kind.__module__).partition(".")[0]


def is_of_library(value: Any) -> bool:
    """Whether the class of ``value`` is of a library that we know."""
    return package_of(class_of(value)) in LIBRARIES


def storage_of(tensor: Any) -> int:
    """Where a plain tensor lies in memory, which its views share; otherwise ``NO_STORAGE``."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return NO_STORAGE
    return tensor.untyped_storage().data_ptr() or NO_STORAGE
