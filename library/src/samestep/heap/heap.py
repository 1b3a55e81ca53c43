"""The objects of a program by names that a restart finds again, and what has changed in them.

When training begins, a walk from a few roots gives each object a name, such as ``Model.replay[0]``.
After a restart the program makes the same objects, which get the same names. What an object holds
is one value (a list, a tensor) or several fields (attributes). Each is compared with what it was
when training began; what differs is written, under the name of its object, and given back to the
object of that name. Whoever shares the object sees that. See ``kinds`` for what an object holds,
and ``stream`` for the bytes.

What lies behind a value that training changes gets no name: a restart would not find it.
"""

import logging
import pickle
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from samestep.heap.kinds import (
    ATOMS,
    ATTRIBUTES,
    Kind,
    classes_of,
    fields_elsewhere,
    is_installed,
    kind_of,
)
from samestep.heap.stream import (
    CONTAINERS,
    MAX_ITEMS,
    NO_STORAGE,
    Reader,
    TooLargeError,
    Writer,
    path_of,
    storage_of,
)

log = logging.getLogger(__name__)

Unit = tuple[str, str | None]
"""The name of an object, and a field of it; None: its one value."""
MAX_OBJECTS = 200_000
MAX_NAMED = 10_000  # items of a container that get names; a longer one is still compared
MANY = 2**18  # numbers of a tensor whose version is compared, and not its bytes
Refer = Callable[[], Any]


class Look(NamedTuple):
    """What is found of one value."""

    mark: Any
    """Differs for another value."""
    is_whole: bool
    """Whether it can be written and given back."""
    is_lost: bool
    """Whether there is something in it that no checkpoint holds, and may be state."""


class Heap:
    """The objects of one process."""

    def __init__(self) -> None:
        self.changed: set[Unit] = set()
        """What had another value than when training began, also in earlier processes."""
        self.passing: set[Unit] = set()
        """What reading a batch changes: it is ahead of the steps, and is not kept."""
        self.lost: set[str] = set()
        """The names of what has changed and cannot be kept."""
        self._marks: dict[Unit, Any] = {}  # when training began
        self._names: dict[int, str] = {}
        # Python gives the id of a dead object to another one, so each is asked whether it lives.
        self._objects: dict[str, Refer] = {}
        self._held: set[int] = set()
        self._names_held: set[str] = set()
        self._too_large: set[Unit] = set()

    # -- Names

    def name_objects(self, roots: Mapping[str, Any], held: Collection[Any]) -> None:
        """Name what can be reached, but not through what has changed.

        Args:
            roots: from where to go, by name.
            held: objects and tensors that a checkpoint holds elsewhere: they get names, and what
                they hold is not written.
        """
        self.hold(held)
        seen = set[int]()
        todo = deque(roots.items())
        while todo and len(seen) < MAX_OBJECTS:
            name, value = todo.popleft()
            if type(value) in ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            self._name(name, value)
            # Properties, lengths and classes of objects of others may raise anything.
            try:
                todo.extend(self._parts_of(name, value))
            except Exception:
                log.debug("%s cannot be read", name, exc_info=True)

    def hold(self, held: Collection[Any]) -> None:
        """Leave out what these objects and tensors hold; training may have made others."""
        self._held = {id(each) for each in held} | {storage_of(each) for each in held}
        self._held.discard(NO_STORAGE)

    def _name(self, name: str, value: Any) -> None:
        try:
            refer: Refer = weakref.ref(value)
        except TypeError:
            # Such as a list, which is kept alive instead.
            refer = partial(lambda kept: kept, value)
        self._names[id(value)] = name
        self._objects[name] = refer
        # Also when training has put another one in its place: this one is never given back.
        if self._is_held(value):
            self._names_held.add(name)

    def name_of(self, value: Any) -> str | None:
        """The name of an object; None if it is new."""
        name = self._names.get(id(value))
        return name if name is not None and self.find(name) is value else None

    def find(self, name: str) -> Any:
        """The object with a name; None if there is none."""
        return self._objects[name]() if name in self._objects else None

    def _parts_of(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """What an object holds, by names."""
        kind = kind_of(value)
        if kind is None or not kind.has_fields:
            return [] if (name, None) in self.changed else items_of(name, value)
        if kind is ATTRIBUTES and is_installed(type(value)) and not self._is_whole(value):
            # Such as a connection or a file: half of its state would be worse than none.
            del self._objects[name]
            return []
        units = {(name, field): part for field, part in self._fields_of(value, kind).items()}
        parts = [(text_of(unit), part) for unit, part in units.items() if unit not in self.changed]
        return parts + [(f"class {'.'.join(path_of(each))}", each) for each in classes_of(value)]

    def _is_whole(self, value: Any) -> bool:
        """Whether an object could be made anew."""
        names = self.name_of
        writer = Writer(lambda part: None if part is value else names(part), self._is_held)
        with suppress(TooLargeError):
            return writer.write(value).is_whole
        return False

    # -- What objects hold

    def _fields_of(self, value: Any, kind: Kind) -> dict[str, Any]:
        fields: dict[str, Any] = kind.read(value)
        elsewhere = fields_elsewhere(value) if id(value) in self._held else ()
        return {name: part for name, part in fields.items() if name not in elsewhere}

    def _is_held(self, value: Any) -> bool:
        return id(value) in self._held or storage_of(value) in self._held

    def _units(self) -> Iterator[tuple[Unit, Any]]:
        """What each object holds now."""
        for name in list(self._objects):
            value = self.find(name)
            kind = kind_of(value)
            # Code of others runs here, and no run must end because its objects are inspected.
            try:
                if kind is not None and kind.has_fields:
                    fields = self._fields_of(value, kind)
                    yield from (((name, field), part) for field, part in fields.items())
                elif kind is not None and name not in self._names_held:
                    yield (name, None), kind.read(value)
            except Exception:
                log.debug("%s cannot be read", name, exc_info=True)

    def _look_at(self, unit: Unit, value: Any) -> Look:
        name = self.name_of(value)
        if name is not None:
            return Look(name, True, False)
        if unit not in self._too_large:
            # Classes, lengths and comparisons of objects of others may raise anything.
            try:
                mark = quick_mark(value)
                if mark is not None:
                    return Look(mark, True, False)
                frame = self._writer().write(value)
                return Look(frame.checksum(), frame.is_whole, frame.is_lost)
            except TooLargeError:
                self._too_large.add(unit)
            except Exception:
                log.debug("%s cannot be read", unit, exc_info=True)
        size = len(value) if type(value) in CONTAINERS else 0
        return Look(size, False, True)

    def _writer(self) -> Writer:
        return Writer(self.name_of, self._is_held)

    # -- What has changed

    def marks(self) -> dict[Unit, Any]:
        """What differs for other values, of everything."""
        return {unit: self._look_at(unit, value).mark for unit, value in self._units()}

    def begin(self) -> None:
        """Compare with the values of now from here on."""
        self._marks = self.marks()

    def changed_since(self, before: Mapping[Unit, Any]) -> set[Unit]:
        """What differs from earlier ``marks``."""
        return {unit for unit, mark in self.marks().items() if before.get(unit) != mark}

    # -- Bytes

    def dump(self) -> dict[str, Any]:
        """What has changed, as ``torch.save`` writes it: bytes as a tensor."""
        kept = [*self._find_kept()]
        writer = self._writer()
        frames = [writer.write((*unit, value)) for unit, value in kept]
        parts = [b"".join(frame.content for frame in frames)]
        for frame in frames:
            parts += frame.buffers
        joined = torch.from_numpy(np.frombuffer(bytearray(b"".join(parts)), np.uint8))
        units = [(*unit, frame.checksum()) for (unit, _), frame in zip(kept, frames, strict=True)]
        return {"bytes": joined, "sizes": [*map(len, parts)], "units": units}

    def _find_kept(self) -> Iterator[tuple[Unit, Any]]:
        """What has changed and can be given back."""
        for unit, value in self._units():
            look = self._look_at(unit, value)
            if look.mark != self._marks.get(unit):
                self.changed.add(unit)
            if unit not in self.changed or unit in self.passing:
                continue
            if look.is_whole:
                yield unit, value
            elif look.is_lost:
                self.lost.add(text_of(unit))

    def load(
        self,
        packed: Mapping[str, Any],
        device: torch.device,
        is_wanted: Callable[[str, str | None], bool] = lambda name, field: True,
    ) -> set[str]:
        """Give the objects of this program what they held.

        Args:
            packed: what ``dump`` has returned.
            device: for new tensors that were on one.
            is_wanted: whether a field of an object is given back now; gets both names.

        Returns:
            The names of what this program cannot make or does not have.

        Raises:
            NotOursError: if ``dump`` has not written this.
        """
        content, *buffers = (
            part.clone().numpy() for part in packed["bytes"].split(packed["sizes"])
        )
        reader = Reader(content.tobytes(), iter(buffers), self.find, device)
        # All are read before any is changed.
        frames = [(reader.next_value(), reader.is_whole) for _ in packed["units"]]
        failed = set()
        for (name, field, value), is_whole in frames:
            self.changed.add((name, field))
            if is_wanted(name, field) and not (is_whole and self._write(name, field, value)):
                failed.add(text_of((name, field)))
        return failed

    def _write(self, name: str, field: str | None, new: Any) -> bool:
        """Give an object what it held; False if it cannot have it."""
        value = self.find(name)
        if value is None and name in self._objects:
            # Nobody has it any more: what held it has got another one.
            return True
        kind = kind_of(value)
        if kind is None:
            return False
        try:
            kind.write(value, new if field is None else {field: new})
        # Code of the object runs here, and may raise anything.
        except Exception:
            log.debug("%s cannot be restored", name, exc_info=True)
            return False
        return True


def items_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """The items of a container, by names; none of a long one."""
    if not isinstance(value, dict | list | tuple | deque) or len(value) > MAX_NAMED:
        return []
    if isinstance(value, dict):
        # The address of a key that is an object is another one after a restart.
        return [(f"{name}[{key!r}]", part) for key, part in value.items() if is_constant(key)]
    return [(f"{name}[{index}]", part) for index, part in enumerate(value)]


def text_of(unit: Unit) -> str:
    """How people call it, such as ``Model.momentum``."""
    name, field = unit
    return name if field is None else f"{name}.{field.rpartition('.')[2]}"


def quick_mark(value: Any) -> Any:
    """What differs for another value, where nothing is in it that has a name; None: not known."""
    if type(value) in ATOMS:
        # nan differs from itself.
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, Tensor) and value.numel() > MANY and not value.is_inference():
        # Its bytes are not read: a change in place gives a tensor another version.
        return value.data_ptr(), value._version, value.shape
    # The items of a list, as of the files of a data set.
    if type(value) is tuple and value and type(value[0]) is list and len(value[0]) > MAX_NAMED:
        return zlib.crc32(pickle.dumps(value, 5)) if are_constant(value[0]) else None
    return None


def are_constant(items: list[Any]) -> bool:
    """Whether there are only numbers and texts in a long list, or tuples of them."""
    if len(items) > MAX_ITEMS:
        raise TooLargeError
    kinds = set(map(type, items))
    if tuple in kinds:
        kinds |= set(map(type, chain.from_iterable(i for i in items if type(i) is tuple)))
    return kinds - {tuple} <= ATOMS


def is_constant(key: Any) -> bool:
    """Whether a key of a dictionary is the same after a restart."""
    return all(map(is_constant, key)) if type(key) is tuple else type(key) in ATOMS
