"""Writes objects as bytes, and reads them without running any code that the bytes name.

The bytes are those of ``pickle``. An object with a name is written as its name; what is new is
written where it is found, so objects that are reached twice stay one object, and may hold each
other. ``Reader`` alone reads them, by a table of opcodes, as torch does for ``weights_only=True``:
it makes values of ``SAFE`` classes, and objects of classes that the program has imported, without
``__init__``. It calls nothing else: no ``__reduce__``, no ``__setstate__``, no method.
"""

import io
import logging
import pickle
import sys
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial, reduce
from pathlib import PosixPath, PurePosixPath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from samestep.errors import RunError
from samestep.heap.kinds import (
    ATOMS,
    FRAMEWORKS,
    Kind,
    is_installed,
    kind_of,
    kind_of_class,
    read_attributes,
    read_numbers,
    write_attributes,
)

log = logging.getLogger(__name__)

MAX_ITEMS = 1_000_000  # of one value; plain numbers count too
CONTAINERS = {list, dict, set, deque, OrderedDict, defaultdict, Counter}
SAFE: set[Any] = {
    *CONTAINERS, *ATOMS, frozenset, tuple, bytearray, range, slice, date, datetime, time, timedelta,
    timezone, Decimal, Fraction, PosixPath, PurePosixPath, torch.Size, torch.device,
}  # fmt: skip
"""Classes that the bytes may call: they make a value of their arguments, and do nothing else."""
STATE = type, FunctionType, BuiltinFunctionType, MethodType, nn.Module, Tensor, np.ndarray
"""What a program exchanges, whoever has written its class."""
OPCODES = (
    b"\x80", b"\x94", b"\x95", b".", b"(", b"0", b"1", b"N", b"K", b"M", b"J", b"\x8a", b"\x8b",
    b"\x88", b"\x89", b"G", b"U", b"T", b"\x8c", b"X", b"\x8d", b"C", b"B", b"\x8e", b"\x96",
    b"\x97", b"\x98", b"]", b"}", b")", b"\x8f", b"\x91", b"\x85", b"\x86", b"\x87", b"t", b"h",
    b"j", b"\x93", b"Q", b"R", b"a", b"e", b"s", b"u", b"\x90",
)  # fmt: skip
"""What a stream of ours consists of; not BUILD, NEWOBJ, INST, OBJ, GLOBAL or EXT."""


class TooLargeError(Exception):
    """A value holds more items than are written."""


class Frame(NamedTuple):
    """One value as bytes."""

    content: bytes
    buffers: list[bytes]
    """Of the tensors and arrays in it."""
    is_whole: bool
    """Whether ``Reader`` gives all of it back."""
    is_lost: bool
    """Whether there is something in it that no checkpoint holds, and may be state."""

    def checksum(self) -> int:
        """A number that differs for other values."""
        number = zlib.crc32(self.content)
        for buffer in self.buffers:
            number = zlib.crc32(buffer, number)
        return number


class Writer(pickle.Pickler):
    """Writes values one after the other; what several of them hold is written once.

    Args:
        name_of: the name of an object; None if it is new.
        is_held: whether a checkpoint holds the memory of a tensor elsewhere.
    """

    def __init__(
        self, name_of: Callable[[Any], str | None], is_held: Callable[[Tensor], bool]
    ) -> None:
        self._file = io.BytesIO()
        self._buffers: list[bytes] = []
        super().__init__(self._file, 5, buffer_callback=self._keep)
        self._name_of = name_of
        self._is_held = is_held
        self._is_whole, self._is_lost = True, False
        self._num_left = MAX_ITEMS

    def write(self, value: Any) -> Frame:
        """The bytes of one value.

        Raises:
            TooLargeError: if it holds too many items.
            Exception: whatever the code of an object raises that is read.
        """
        self._file.seek(0)
        self._file.truncate()
        self._buffers, self._is_whole, self._is_lost, self._num_left = [], True, False, MAX_ITEMS
        self.dump(value)
        return Frame(self._file.getvalue(), self._buffers, self._is_whole, self._is_lost)

    def persistent_id(self, value: Any) -> str | None:
        """The name that is written in the place of an object."""
        self._num_left -= 1
        if self._num_left < 0:
            raise TooLargeError
        return None if type(value) in ATOMS else self._name_of(value)

    def reducer_override(self, value: Any) -> Any:
        """What makes an object without a name again."""
        kind = type(value)
        is_named = isinstance(value, type | FunctionType) and value in WRITTEN
        # What is written by its name, or by the arguments of its class.
        if is_named or kind in SAFE or kind is torch.dtype:
            return NotImplemented
        for kinds, reduce_value in self.reducers.items():
            if isinstance(value, kinds):
                return reduce_value(self, value)
        return self._reduce_object(value, kind)

    def _reduce_object(self, value: Any, kind: type) -> Any:
        if find(*path_of(kind)) is not kind:
            return self._give_up(value)
        if isinstance(value, tuple):
            return make_tuple, (*path_of(kind), tuple(value))
        found = kind_of(value)
        if found is None or hasattr(kind, "__del__"):
            return self._give_up(value)
        return make_object, path_of(kind), contents_of(value, found), None, None, fill_object

    def _reduce_function(self, value: Any) -> Any:
        path = path_of(value)
        return (make_function, path) if make_function(*path) is value else self._give_up(value)

    def _reduce_member(self, value: Enum) -> Any:
        return make_member, (*path_of(type(value)), value.name)

    def _reduce_method(self, value: MethodType) -> Any:
        return make_method, (value.__self__, value.__name__)

    def _reduce_partial(self, value: "partial[Any]") -> Any:
        return make_partial, (value.func, value.args, value.keywords)

    def _reduce_numbers(self, value: "array[Any]") -> Any:
        return make_numbers, read_numbers(value)

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if self._is_held(tensor):
            self._is_whole = False
            return make_nothing, (tensor.data_ptr(), tensor._version)
        is_learned = tensor.requires_grad and tensor.is_leaf
        if tensor.is_sparse and type(tensor) is Tensor:
            parts = tensor.detach().coalesce()
            return make_sparse, (parts.indices(), parts.values(), tuple(tensor.shape), is_learned)
        if not is_plain_tensor(tensor):
            return self._give_up(tensor)
        # A copy: torch lets no tensor grow any more whose memory NumPy has seen.
        copied = tensor.detach().to("cpu", copy=True)
        flat: Any = copied.contiguous().flatten().view(torch.uint8).numpy()
        facts = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.is_cpu
        is_parameter = type(tensor) is nn.Parameter
        return make_tensor, (pickle.PickleBuffer(flat), *facts, is_learned, is_parameter)

    def _reduce_array(self, found: Any) -> Any:
        is_array = isinstance(found, np.ndarray)
        if is_array and type(found) is not np.ndarray:
            return self._give_up(found)
        if found.dtype.hasobject:
            return make_objects, (found.shape, found.ravel().tolist())
        values: Any = np.frombuffer(found.tobytes(), np.uint8)
        dtype = found.dtype.descr if found.dtype.names else found.dtype.str
        return make_array, (pickle.PickleBuffer(values), dtype, found.shape, is_array)

    def _give_up(self, value: Any) -> Any:
        # What a library holds, such as a lock or a file, is no state of the training.
        kind = value if isinstance(value, type | FunctionType) else type(value)
        self._is_lost |= isinstance(value, STATE) or not is_installed(kind)
        self._is_whole = False
        # Another one differs, where values are compared.
        return make_nothing, (type(value).__name__, id(value))

    reducers: ClassVar[dict[Any, Callable[..., Any]]] = {
        Tensor: _reduce_tensor,
        (np.ndarray, np.generic): _reduce_array,
        Enum: _reduce_member,
        (type, FunctionType, BuiltinFunctionType): _reduce_function,
        MethodType: _reduce_method,
        partial: _reduce_partial,
        array: _reduce_numbers,
    }

    def _keep(self, buffer: pickle.PickleBuffer) -> None:
        self._buffers.append(bytes(buffer.raw()))


class Lost:
    """In the place of what cannot be given back."""


class NotOursError(RunError):
    """The bytes ask for something that ``Writer`` does not write."""

    is_final = True

    def __init__(self, why: object) -> None:
        super().__init__(
            f"the objects in the checkpoint are not what a run of samestep has written: {why}. "
            "Continue with a checkpoint that you know"
        )


class Reader(pickle._Unpickler):
    """Reads what ``Writer`` has written.

    Args:
        content: the bytes of all values.
        buffers: of the tensors and arrays in them.
        find_object: the object with a name; None if there is none.
        device: for new tensors that were on one.
    """

    stack: list[Any]  # of the class that it inherits, in Python
    metastack: list[list[Any]]

    def __init__(
        self,
        content: bytes,
        buffers: Iterator[Any],
        find_object: Callable[[str], Any],
        device: torch.device,
    ) -> None:
        super().__init__(io.BytesIO(content), buffers=buffers)
        self._find_object = find_object
        self._device = device
        self.is_whole = True
        """Whether nothing was lost in what was read last."""

    def next_value(self) -> Any:
        """The next value.

        Raises:
            NotOursError: if ``Writer`` has not written this.
        """
        self.is_whole = True
        try:
            return self.load()
        except NotOursError:
            raise
        # Whatever forged bytes lead to.
        except Exception as error:
            raise NotOursError(repr(error)) from error

    def persistent_load(self, name: Any) -> Any:
        """The object with this name."""
        value = self._find_object(name)
        self.is_whole &= value is not None
        return value

    def find_class(self, module: str, name: str) -> Any:
        """What the bytes may name: our makers, safe classes, and types of numbers."""
        if module == __name__:
            return MAKERS[name]
        found = find(module, name)
        if found in SAFE or isinstance(found, torch.dtype):
            return found
        raise NotOursError(f"{module}.{name} is not read")

    def call(self) -> None:
        """Call one of our makers, or a safe class."""
        arguments = self.stack.pop()
        make = self.stack[-1]
        if type(arguments) is not tuple or not any(make is known for known in WRITTEN):
            raise NotOursError(f"{type(make).__name__} is not called")
        if make is make_tensor:
            make = partial(make, self._device)
        # A class may have other attributes in this program.
        try:
            self.stack[-1] = make(*arguments)
        except Exception as error:
            log.debug("%s", error, exc_info=True)
            self.stack[-1] = Lost()
        self.is_whole &= not isinstance(self.stack[-1], Lost)

    def add(self, opcode: int) -> None:
        """Add items to a container; an object of the program may have methods of these names."""
        # Several items stand behind a mark, below which is the container.
        depth = ONE_ITEM.get(opcode)
        target = self.stack[-depth] if depth else self.metastack[-1][-1]
        if type(target) not in CONTAINERS:
            raise NotOursError(f"nothing is added to {type(target).__name__}")
        add: Any = pickle._Unpickler.dispatch[opcode]
        add(self)

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in OPCODES
    } | {b"R"[0]: call}
    dispatch |= {code: partial(lambda code, reader: reader.add(code), code) for code in b"aesu\x90"}


ONE_ITEM = {b"a"[0]: 2, b"s"[0]: 3}
"""Where on the stack the container is, to which one item is added."""


# -- Makers ----------------------------------------------------------------------------------------


def path_of(thing: Any) -> tuple[str, str]:
    """The module and name by which ``find`` finds a class or function."""
    # Functions of torch that are not Python have no module.
    if isinstance(thing, BuiltinFunctionType):
        return "torch", thing.__name__
    return str(getattr(thing, "__module__", "")), str(getattr(thing, "__qualname__", ""))


def find(module: str, name: str) -> Any:
    """What the program has imported under this name; ``Lost`` if there is nothing."""
    try:
        # Not by an import, which would execute whatever module a checkpoint names.
        return reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return Lost


def make_function(module: str, name: str) -> Any:
    """A function or class of torch or of the user, which ``Reader`` never calls.

    ``Lost`` for one of Python, which could do anything.
    """
    found = find(module, name)
    package = module.partition(".")[0]
    is_known = package in FRAMEWORKS or package not in sys.stdlib_module_names
    is_function = isinstance(found, type | FunctionType | BuiltinFunctionType)
    return found if is_known and is_function else Lost()


def make_object(module: str, name: str) -> Any:
    """An object that holds nothing yet."""
    kind = find(module, name)
    found = kind_of_class(kind) if isinstance(kind, type) else None
    # A finalizer would run with whatever attributes a file has given the object.
    return Lost() if found is None or hasattr(kind, "__del__") else found.make(kind)


def contents_of(value: Any, kind: Kind) -> Any:
    """All that is needed to make an object of this kind again."""
    if isinstance(value, Metric):
        return Metric.__getstate__(value)
    # With the attributes that a framework gives to every object of a kind.
    return read_attributes(value) if kind.has_fields else kind.read(value)


def fill_object(value: Any, contents: Any) -> None:
    """Give it to an object that holds nothing yet."""
    kind = kind_of(value)
    if isinstance(value, Metric):
        Metric.__setstate__(value, contents)
    elif kind is not None:
        (write_attributes if kind.has_fields else kind.write)(value, contents)


def make_tuple(module: str, name: str, items: Any) -> Any:
    """A named tuple."""
    kind = find(module, name)
    return tuple.__new__(kind, items)


def make_member(module: str, name: str, member: str) -> Any:
    """The member of an enumeration."""
    kind = find(module, name)
    return kind[member] if isinstance(kind, type) and issubclass(kind, Enum) else Lost()


def make_method(owner: Any, name: str) -> Any:
    """A method of an object."""
    found = find(*path_of(type(owner)))
    function = getattr(found, name, None)
    return MethodType(function, owner) if isinstance(function, FunctionType) else Lost()


def make_partial(function: Any, arguments: Any, named: Any) -> Any:
    """A function with some of its arguments."""
    return partial(function, *arguments, **named)


def make_numbers(typecode: str, content: bytes) -> Any:
    """An array of Python's own."""
    return array(typecode, content)


def make_tensor(
    device: torch.device, values: Any, dtype: str, shape: Any, on_cpu: bool, is_learned: bool,
    is_parameter: bool,
) -> Tensor:  # fmt: skip
    """A tensor of these bytes; on the device of this rank, if it was on one."""
    flat = torch.from_numpy(np.frombuffer(bytearray(values), np.uint8)) if len(values) else None
    kind = getattr(torch, dtype)
    tensor = torch.empty(shape, dtype=kind) if flat is None else flat.view(kind).view(shape)
    tensor = tensor if on_cpu else tensor.to(device)
    if is_parameter:
        return nn.Parameter(tensor, is_learned)
    return tensor.requires_grad_(is_learned)


def make_sparse(indices: Tensor, values: Tensor, shape: Any, is_learned: bool) -> Tensor:
    """A sparse tensor of coordinates."""
    tensor = torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=True, check_invariants=True
    )
    return tensor.requires_grad_(is_learned)


def make_array(values: Any, dtype: Any, shape: Any, is_array: bool) -> Any:
    """An array of these bytes, or a number of NumPy."""
    found = np.frombuffer(bytearray(values), np.dtype(dtype)).reshape(shape)
    return found if is_array else found[()]


def make_objects(shape: Any, items: list[Any]) -> Any:
    """An array of objects."""
    found = np.empty(len(items), object)
    found[:] = items
    return found.reshape(shape)


def make_nothing(*facts: Any) -> Any:
    """What cannot be given back."""
    return Lost()


MAKERS: dict[str, Any] = {
    make.__name__: make
    for make in (
        make_object, fill_object, make_tuple, make_member, make_function, make_method, make_partial,
        make_numbers, make_tensor, make_sparse, make_array, make_objects, make_nothing,
    )
}  # fmt: skip
WRITTEN = {*SAFE, *MAKERS.values()}
"""Classes and functions that are written by their names."""


# -- Tensors ---------------------------------------------------------------------------------------

NO_STORAGE = -1


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
