"""Encodes the values of attributes for a checkpoint, and decodes them again.

An encoded value consists of numbers, text, lists and tuples, which ``torch.load`` accepts with
``weights_only=True``. A tuple names the kind of a value and its fields. The bytes of tensors and
arrays are packed elsewhere; an encoded value says where.
"""

import ast
import logging
import random
import sys
import weakref
import zlib
from abc import ABC
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from functools import cache, partial, reduce
from io import IOBase
from itertools import chain, count, islice, repeat
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, ClassVar, Generic, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric, MetricCollection

from samestep.ranks import epoch_logs
from samestep.ranks.sharded import class_of
from samestep.run.checkpoint import is_plain

FRAMEWORKS = {"torch", "lightning", "samestep", "torchmetrics", "omegaconf"}
LIBRARIES = FRAMEWORKS | sys.stdlib_module_names
MAX_UNKNOWN = 1_000  # items of an object that cannot be decoded
NUM_ENDS = 64  # items at each end of a list that is too long
MAX_DEPTH = 8  # lists in objects in lists..., and objects that hold each other
PLAIN = {type(None), bool, int, float, str}
ITEMS = (list, tuple, deque, set, frozenset)
FUNCTIONS = FunctionType, MethodType, partial
NEW_ITEMS = {*ITEMS, dict, OrderedDict}  # containers that can be made from their items
UNTRACKED = ("untracked", None)  # has no state, or a checkpoint holds it elsewhere
log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any] | np.generic
MISSING = object()  # there is no value that could be changed
NO_STORAGE = -1
# Parents that add no state of their own to the attributes of an object.
PLAIN_PARENTS = {*Namespace.__mro__, ABC, Generic, Protocol, tuple}
# A new number each time makes a value differ from every earlier one.
NUMBERS = count()

GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""What reads and what sets the state of each kind of random generator."""


class CannotDecodeError(Exception):
    """Only the program itself can create such an object."""


class Encoder:
    """Encodes one value.

    Args:
        ignored: ids, and storage addresses, of what a checkpoint holds elsewhere.
        put: gets each tensor and array; what it returns is encoded in its place.
        limit: no more items are encoded.
        first: ids of what existed when training began. Such objects are restored in place, because
            other parts of the program may share them.
        looks_behind: encode what functions may change; it is only compared.
    """

    def __init__(
        self,
        ignored: Collection[int],
        put: Callable[[Any], Any],
        limit: int,
        first: Container[int] = (),
        looks_behind: bool = False,
    ) -> None:
        self.ignored = ignored
        self.put = put
        self.limit = limit
        self.first = first
        self.looks_behind = looks_behind
        self.is_complete = True
        """Whether ``Decoder`` restores everything that was encoded."""
        self.objects: dict[int, Any] = {}
        """What was found in the value, by its id."""
        self._num_left = limit

    def encode(self, value: Any, depth: int = 0) -> Any:
        """What ``Decoder`` needs to restore ``value``."""
        self._num_left -= 1
        # The exact type: a subclass, such as an IntEnum, must not become a plain number.
        if type(value) is int:
            return encode_int(value)
        if type(value) in PLAIN:
            return value
        # Reading runs code of others: properties, lengths and comparisons may raise anything, and
        # no run must end because its attributes are inspected.
        try:
            return self._encode(value, depth)
        except Exception:
            log.debug("%s cannot be read", type(value).__name__, exc_info=True)
            return self._give_up()

    def _encode(self, value: Any, depth: int) -> Any:
        if isinstance(value, complex | bytes):
            return "literal", repr(value)
        if isinstance(value, Enum):
            return "member", name_of(type(value)), value.name
        # Immutable constants may have several unrelated owners, which tells nothing.
        if not isinstance(value, tuple | frozenset | np.generic):
            self.objects[id(value)] = value
        if id(value) in self.ignored or storage_of(value) in self.ignored:
            return UNTRACKED
        if depth > MAX_DEPTH or self._num_left < 0:
            return self._give_up()
        return self._encode_parts(value, depth + 1)

    def _encode_parts(self, value: Any, depth: int) -> Any:
        for kinds, encode in self._encoders.items():
            if isinstance(value, kinds):
                return encode(self, value, depth)
        return self._encode_object(value, depth)

    def _encode_tensor(self, tensor: Tensor, depth: int) -> Any:
        if not is_plain_tensor(tensor):
            return self._give_up()
        return (
            "tensor",
            id(tensor) in self.first,
            str(tensor.dtype).removeprefix("torch."),
            [*tensor.shape],
            # Not the device itself: a rank may resume on another GPU.
            tensor.device.type == "cpu",
            tensor.requires_grad and tensor.is_leaf,
            self.put(tensor),
        )

    def _encode_array(self, array: Array, depth: int) -> Any:
        # The bytes of objects are addresses, which mean nothing in another process.
        if array.dtype.hasobject or array.dtype.names:
            return self._give_up()
        return (
            "array",
            id(array) in self.first,
            array.dtype.str,
            [*array.shape],
            isinstance(array, np.ndarray),
            self.put(array),
        )

    def _encode_items(self, value: Any, depth: int) -> Any:
        items: list[Any] = []
        if isinstance(value, dict):
            for key, item in self._ends(value.items()):
                items.append([self.encode(key, depth), self.encode(item, depth)])
        else:
            for item in self._ends(value):
                items.append(self.encode(item, depth))
        return (
            "items",
            id(value) in self.first,
            name_of(class_of(value)),
            getattr(value, "maxlen", None),
            len(value),
            items,
        )

    def _encode_generator(self, value: Any, depth: int) -> Any:
        get_state, _ = state_functions(value)
        return "generator", self._encode_apart(get_state(value))

    def _encode_state_dict(self, value: Any, depth: int) -> Any:
        return "state_dict", self._encode_apart(value.state_dict())

    def _encode_module(self, module: nn.Module, depth: int) -> Any:
        weights = {}
        state = module.state_dict()
        for name, value in state.items():
            # The module may wrap a net that a checkpoint holds elsewhere.
            if id(value) not in self.ignored and storage_of(value) not in self.ignored:
                weights[name] = value
        others: list[Any] = []
        for path, part in find_parts(module):
            if id(part) in self.ignored:
                continue
            for name, value in unsaved_attributes(part, path, state).items():
                # A metric replaces its states, some of which it has in common with its defaults.
                if isinstance(part, Metric):
                    encoded = self._encode_apart(value)
                else:
                    encoded = self.encode(value, depth)
                others.append([path, name, encoded])
        is_whole = len(weights) == len(state)
        return "module", is_whole, [self._encode_apart(weights), others]

    def _encode_function(self, function: Any, depth: int) -> Any:
        self._note_objects(function)
        if not self.looks_behind:
            return UNTRACKED
        behind = [self.encode(value, depth) for value in values_behind(function)]
        return "function", behind

    _encoders: ClassVar[dict[Any, Callable[["Encoder", Any, int], Any]]] = {
        Tensor: _encode_tensor,
        (np.ndarray, np.generic): _encode_array,
        (*ITEMS, dict): _encode_items,
        tuple(GENERATORS): _encode_generator,
        # A net or a metric in a list or a callback.
        nn.Module: _encode_module,
        # An optimizer that Lightning does not know.
        (Optimizer, LRScheduler): _encode_state_dict,
        FUNCTIONS: _encode_function,
    }
    """By the kinds of values; the first one that fits counts, and any other value is an object."""

    def _encode_object(self, value: Any, depth: int) -> Any:
        kind = class_of(value)
        # Loggers, locks, paths: state of a library's object is not state of the training.
        # Namespaces only hold attributes of the user.
        if is_of_library(value) and kind not in (Namespace, SimpleNamespace):
            if not isinstance(value, Iterator) or isinstance(value, IOBase):
                return UNTRACKED
            # An iterator's position cannot be read; assume that it advances.
            self.is_complete = False
            return "iterator", next(NUMBERS)
        # It is only compared, so fewer items are enough.
        if not is_plain_class(kind):
            self.is_complete = False
            self._num_left = min(self._num_left, MAX_UNKNOWN)
        attributes: list[Any] = []
        for name, attribute in attributes_of(value).items():
            attributes.append([name, self.encode(attribute, depth)])
        return "object", id(value) in self.first, name_of(kind), attributes

    def _give_up(self) -> tuple[str, None]:
        self.is_complete = False
        return UNTRACKED

    def _encode_apart(self, state: Any) -> Any:
        """Encode a state that was made for this moment only, so that nothing can share it."""
        # Python may give the ids of its objects to other objects at once, so they are not noted.
        encoder = Encoder(self.ignored, self.put, self.limit)
        encoded = encoder.encode(state)
        self.is_complete &= encoder.is_complete
        return encoded

    def _note_objects(self, function: Any) -> None:
        """Note what a function, such as one of a data set, may change when it is called."""
        for value in values_behind(function):
            if type(value) not in PLAIN:
                self.objects[id(value)] = value

    def _ends(self, items: Collection[Any]) -> Iterable[Any]:
        """The items; only the first and the last ones if there are too many."""
        if len(items) <= self.limit:
            return items
        # What grows or moves, such as a replay buffer, changes at one of its ends.
        self.is_complete = False
        first = islice(items, NUM_ENDS)
        last = islice(items, len(items) - NUM_ENDS, None)
        return [*first, *last]


def encode_int(value: int) -> Any:
    """A whole number, or its text if torch cannot read it back: in decimals it has a limit too."""
    if is_plain(value):
        return value
    return "literal", hex(value)


class LivingIds:
    """The ids of objects that still exist: Python gives the id of a dead one to another object."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._find: dict[int, Callable[[], Any]] = {}
        for value in objects:
            try:
                self._find[id(value)] = weakref.ref(value)
            except TypeError:
                # Such as a list, which is kept alive instead.
                self._find[id(value)] = partial(lambda kept: kept, value)

    def __contains__(self, number: object) -> bool:
        find = self._find.get(number)  # type: ignore[call-overload]
        return find is not None and find() is not None


def values_behind(function: Any) -> list[Any]:
    """What a function may change when it is called: its owner, its arguments, its closure."""
    values = []
    if isinstance(function, partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None:
        values.append(owner)
    values += getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        # Reading an empty cell raises.
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


class Packed:
    """Copies of many tensors and arrays in one tensor, which is saved as one."""

    def __init__(self) -> None:
        self._parts = [torch.empty(0, dtype=torch.uint8)]
        self._size = 0

    def put(self, data: Tensor | Array) -> list[int]:
        """Add one; returns where its bytes begin and end."""
        part = bytes_of(data)
        begin = self._size
        self._parts.append(part)
        self._size += len(part)
        return [begin, self._size]

    def joined(self) -> Tensor:
        """All bytes, uint8 ``[bytes]``."""
        return torch.cat(self._parts)


class Decoder:
    """Restores encoded values.

    Args:
        packed: the bytes of their tensors and arrays, uint8 ``[bytes]``.
        device: where tensors are created that were not in the memory of the CPU.
    """

    def __init__(self, packed: Tensor, device: torch.device) -> None:
        self.packed = packed
        self.device = device
        self._decoders: dict[str, Callable[..., Any]] = {
            "array": self._decode_array,
            "generator": self._decode_generator,
            "items": self._decode_items,
            "literal": self._decode_literal,
            "member": self._decode_member,
            "module": self._decode_module,
            "object": self._decode_object,
            "state_dict": self._decode_state_dict,
            "tensor": self._decode_tensor,
        }

    def decode(self, value: Any, encoded: Any) -> Any:
        """What was encoded; ``value`` itself, changed, if it must be restored in place.

        Raises:
            CannotDecodeError: if there is no ``value`` to be changed, and no other can be created.
        """
        if not isinstance(encoded, tuple):
            return encoded
        kind, *fields = encoded
        decode: Callable[..., Any] = self._decoders.get(kind, self._keep)
        return decode(value, *fields)

    def _keep(self, value: Any, *fields: Any) -> Any:
        if value is MISSING:
            raise CannotDecodeError
        return value

    def _decode_literal(self, value: Any, text: str) -> Any:
        return ast.literal_eval(text)

    def _decode_member(self, value: Any, name: str, member: str) -> Any:
        return find_class(name)[member]  # type: ignore[index]

    def _decode_generator(self, value: Any, state: Any) -> Any:
        _, set_state = state_functions(self._keep(value))
        set_state(value, self.decode(MISSING, state))
        return value

    def _decode_state_dict(self, value: Any, state: Any) -> Any:
        self._keep(value).load_state_dict(self.decode(MISSING, state))
        return value

    def _decode_module(self, value: Any, is_whole: bool, encoded: Any) -> Any:
        weights, others = encoded
        parts = dict(find_parts(self._keep(value)))
        # Such as a metric that makes its parts while it counts.
        if any(path not in parts for path, _, _ in others):
            raise CannotDecodeError
        # In place, because an optimizer may have these weights.
        value.load_state_dict(self.decode(MISSING, weights), strict=is_whole)
        for path, name, item in others:
            part = parts[path]
            set_attribute(part, name, self.decode(attribute_of(part, name), item))
        return value

    def _bytes_at(self, place: list[int]) -> Tensor:
        begin, end = place
        # A copy starts at an aligned address, which a view of another dtype needs.
        return self.packed[begin:end].clone()

    def _decode_tensor(
        self, value: Any, is_first: bool, dtype: str, shape: list[int], on_cpu: bool,
        is_learned: bool, place: Any,
    ) -> Any:  # fmt: skip
        tensor = self._bytes_at(place).view(getattr(torch, dtype)).view(shape)
        if is_first and has_room(value, tensor):
            # A leaf that requires a gradient cannot be changed in place otherwise.
            with torch.no_grad():
                return value.copy_(tensor)
        tensor = tensor.to("cpu" if on_cpu else self.device)
        tensor.requires_grad = is_learned
        return tensor

    def _decode_array(
        self, value: Any, is_first: bool, dtype: str, shape: list[int], is_array: bool, place: Any
    ) -> Any:
        array = self._bytes_at(place).numpy().view(dtype).reshape(shape)
        if is_first and has_room(value, array):
            value[...] = array
            return value
        # A scalar of NumPy is an array without dimensions, read by an empty index.
        return array if is_array else array[()]

    def _decode_items(
        self, value: Any, is_first: bool, name: str, maxlen: int | None, length: int, items: Any
    ) -> Any:
        kind: Any = class_of(value)
        if name_of(kind) != name:
            # Nothing of the value can be used.
            value, kind, is_first = {}, find_class(name), False
        if issubclass(kind, dict):
            new: Any = self._decode_pairs(value, items)
        else:
            # A set has no order, by which old and new items would belong together.
            old = () if issubclass(kind, set | frozenset) else value
            pairs = zip(chain(old, repeat(MISSING)), items, strict=False)
            new = [self.decode(one, item) for one, item in pairs]
        if is_first and not issubclass(kind, tuple | frozenset):
            return replace_items(value, new)
        return make_items(kind, new, maxlen)

    def _decode_pairs(self, old: dict[Any, Any], items: Any) -> dict[Any, Any]:
        new = {}
        for encoded_key, item in items:
            key = self.decode(MISSING, encoded_key)
            new[key] = self.decode(old.get(key, MISSING), item)
        return new

    def _decode_object(self, value: Any, is_first: bool, name: str, encoded: Any) -> Any:
        old: dict[str, Any] = {}
        if name_of(class_of(value)) == name:
            old = attributes_of(value)
        else:
            is_first = False
        if not is_first:
            # Without __init__, whose arguments no checkpoint holds.
            value = object.__new__(find_class(name))
        for attribute, item in encoded:
            new = self.decode(old.get(attribute, MISSING), item)
            # A frozen dataclass rejects ordinary assignment.
            object.__setattr__(value, attribute, new)
        return value


def find_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of a module by their names, with metrics that are up to date."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            # Members with equal states update one of them only; reading them updates the others.
            list(part.items(keep_base=True, copy_state=False))
    return list(module.named_modules())


def unsaved_attributes(part: nn.Module, path: str, saved: Collection[str]) -> dict[str, Any]:
    """What a part of a module has beside its weights and buffers.

    Args:
        part: of the module.
        path: of the part.
        saved: the names in the ``state_dict`` of the module.
    """
    found = {}
    for name, buffer in part.named_buffers(recurse=False):
        if f"{path}.{name}".lstrip(".") not in saved:
            found[name] = buffer
    names = set[str]()
    if isinstance(part, Metric):
        names = vars(part).keys() - base_attributes(Metric) | epoch_logs.counts_of(part)
    elif not is_of_library(part):
        names = vars(part).keys() - base_attributes(nn.Module)
    # Sorted, because encoded values are compared as text.
    for name in sorted(names):
        found[name] = attribute_of(part, name)
    return found


class PlainMetric(Metric):
    """Has the attributes of every metric."""

    def update(self) -> None:
        """Count nothing."""

    def compute(self) -> None:
        """Compute nothing."""


@cache
def base_attributes(kind: type[nn.Module]) -> set[str]:
    """The attributes that every module of this kind has."""
    return set(vars(PlainMetric() if kind is Metric else kind()))


def attribute_of(owner: Any, name: str) -> Any:
    """An attribute of an object, or a buffer of a module; else ``MISSING``."""
    if is_buffer(owner, name):
        return owner.get_buffer(name)
    return vars(owner).get(name, MISSING)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Give an attribute or a buffer another value."""
    if is_buffer(owner, name):
        setattr(owner, name, value)
    else:
        # A module would register a net that was hidden from it, and a metric rejects some names.
        vars(owner)[name] = value


def is_buffer(owner: Any, name: str) -> bool:
    """Whether ``name`` is a buffer of a module."""
    return isinstance(owner, nn.Module) and name in dict(owner.named_buffers(recurse=False))


def has_room(value: Any, new: Tensor | Array) -> bool:
    """Whether ``value`` is a tensor, or an array, of the shape of ``new``."""
    return isinstance(value, type(new)) and value.shape == new.shape


def replace_items(container: Any, new: Any) -> Any:
    """The same list, deque, set or dictionary with other items."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(new)
    else:
        container.extend(new)
    return container


def make_items(kind: Any, new: Any, maxlen: int | None) -> Any:
    """A container of this class.

    Raises:
        CannotDecodeError: if its class is not known to be nothing but its items.
    """
    # Not by __new__ of a named tuple, which takes the items as separate arguments.
    if issubclass(kind, tuple):
        return tuple.__new__(kind, new)
    if kind not in NEW_ITEMS:
        raise CannotDecodeError
    if kind is deque:
        return deque(new, maxlen)
    return kind(new)


def state_functions(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """What reads the state of a random generator, and what sets it."""
    return next(found for kind, found in GENERATORS.items() if isinstance(generator, kind))


def bytes_of(data: Tensor | Array, step: int = 1) -> Tensor:
    """The bytes of each ``step``-th value, uint8 ``[bytes]`` on the CPU."""
    if isinstance(data, Tensor):
        values = data.detach().flatten()[::step].cpu()
        return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    # from_numpy warns about memory that cannot be written.
    copied = bytearray(data.ravel()[::step].tobytes())
    return torch.from_numpy(np.frombuffer(copied, np.uint8))


def fingerprint(data: Tensor | Array, max_bytes: int) -> int:
    """A number that differs for other values, of ``max_bytes`` spread over all of them."""
    values: Any = bytes_of(data, max(1, data.nbytes // max_bytes)).numpy()
    return zlib.crc32(values)


def numbers_in(encoded: Any) -> Iterator[object]:
    """The numbers in an encoded value, and what ``put`` returned for tensors; not text."""
    if isinstance(encoded, list):
        for part in encoded:
            yield from numbers_in(part)
    elif isinstance(encoded, bool | int | float):
        # Unlike numbers, texts of nan are equal, and 1 differs from True.
        yield repr(encoded)
    elif isinstance(encoded, tuple):
        kind, *fields, parts = encoded
        # Of a list with too many items, only the ends were encoded.
        if kind == "items" and len(parts) < fields[-1]:
            yield fields[-1]
        if kind in ("tensor", "array"):
            yield parts
        else:
            yield from numbers_in(parts)


def find_class(name: str) -> type:
    """A class that the program has imported; nothing is called but ``object.__new__``.

    Raises:
        CannotDecodeError: if there is none, or it is not plain.
    """
    module, _, path = name.partition(":")
    try:
        # Not by an import, which would execute whatever module a checkpoint names.
        found: Any = reduce(getattr, path.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        raise CannotDecodeError from None
    if not isinstance(found, type):
        raise CannotDecodeError
    is_enum = issubclass(found, Enum) and package_of(found) not in LIBRARIES
    is_known = found in NEW_ITEMS or is_enum or is_plain_class(found)
    if not is_known:
        raise CannotDecodeError
    return found


def is_plain_class(kind: type) -> bool:
    """Whether an object of this class is nothing but its attributes, as far as we can know."""
    for parent in kind.__mro__:
        if package_of(parent) in LIBRARIES and parent not in PLAIN_PARENTS:
            return False
    return True


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object, those in ``__slots__`` first."""
    attributes = {}
    for kind in type(value).__mro__:
        for name in vars(kind).get("__slots__", ()):
            # A slot may be empty.
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes | getattr(value, "__dict__", {})


def name_of(kind: type) -> str:
    """The name of a class by which ``find_class`` finds it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def package_of(kind: type) -> str:
    """The package of a class."""
    return str(kind.__module__).partition(".")[0]


def is_of_library(value: Any) -> bool:
    """Whether the class of ``value`` is of a library that we know."""
    return package_of(class_of(value)) in LIBRARIES


def is_plain_tensor(value: Any) -> bool:
    """Whether it is nothing but the bytes of one storage: no subclass, not sparse, not meta."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    return value.layout == torch.strided and not value.is_meta


def storage_of(tensor: Any) -> int:
    """The address of a plain tensor's storage, which its views share; else ``NO_STORAGE``."""
    if not is_plain_tensor(tensor):
        return NO_STORAGE
    # Empty tensors have the address 0 in common.
    return tensor.untyped_storage().data_ptr() or NO_STORAGE
