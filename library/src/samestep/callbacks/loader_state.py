"""Finds the state that data sets and loaders keep in Python, also in loader processes.

No checkpoint holds it, because it may be a batch ahead of the training. It is only named.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from samestep.callbacks.state_codec import (
    FUNCTIONS,
    GENERATORS,
    LIBRARIES,
    Encoder,
    base_attributes,
    fingerprint,
    is_of_library,
    package_of,
    values_behind,
)
from samestep.data.loaders import without_states
from samestep.data.sampler import ExactLoader, WrappedBatches

log = logging.getLogger(__name__)

MAX_NAMED = 1_000  # items that are compared of an attribute that can only be named
BYTES_NAMED = 2**15  # of a tensor that are compared
MAX_REPORT = 2**12  # bytes for the names that a loader process reports
NUM_COMPARED = 3  # batches of a loader process after which its data set is compared
COMPOUND = "items", "object", "function", "module"  # kinds of encoded values that have parts
CALLED = "collate_fn", "transform"  # of a loader or of a data set of ours


class Attribute(NamedTuple):
    """An attribute of the module, of its parts, or of what else takes part in the training.

    name: such as ``Model.net.running``.
    can_be_kept: whether its owner allows that.
    saved: the state of its owner that every checkpoint holds.
    is_of_data: whether a data set or a loader has it.
    """

    name: str
    value: Any
    can_be_kept: bool = False
    saved: Any = None
    is_of_data: bool = False


def attributes_in(owner: Any) -> dict[str, Any]:
    """The attributes of an object; none if it does not show them."""
    try:
        return dict(vars(owner))
    except Exception:
        return {}


def own_attributes(
    name: str, owner: Any, ignored: Collection[str], can_be_kept: bool = False, saved: Any = None
) -> Iterator[Attribute]:
    """The attributes of one object whose names are not ``ignored``."""
    for attribute, value in attributes_in(owner).items():
        # Under DDP Lightning leaves the module's own ``forward`` behind as an attribute.
        is_own_method = type(value) is MethodType and value.__self__ is owner
        if attribute not in ignored and not is_own_method:
            yield Attribute(f"{name}.{attribute}", value, can_be_kept, saved)


def private_names(owner: Any) -> set[str]:
    """The names of its attributes that begin with an underscore."""
    return {name for name in attributes_in(owner) if name.startswith("_")}


def saved_state(owner: Any) -> Any:
    """What an object says that it saves; None if it cannot say so yet."""
    try:
        return owner.state_dict()
    except Exception:
        log.debug("%s has no state yet", type(owner).__name__, exc_info=True)
        return None


def attributes_of_loader(loader: Any, data: Any, module: Any) -> Iterator[Attribute]:
    """The attributes of a loader and of what it reads, such as the passes that a data set counts.

    The DataModule may hold them in its ``state_dict``.

    Args:
        loader: of the training.
        data: the DataModule; None if there is none.
        module: of the run. Both have attributes that are compared anyway.
    """
    saved = saved_state(data) if data is not None else None
    for part in parts_of_loader(loader):
        # Lightning tells a sampler that has ``set_epoch`` the epoch, also after a restart.
        is_told = hasattr(type(part), "set_epoch") and part is not getattr(loader, "dataset", None)
        if is_told or part is data or part is module:
            continue
        # Private attributes of a loader belong to torch's DataLoader.
        ignored = private_names(loader) if part is loader else ()
        yield from attributes_of_data(part, ignored, saved)


def attributes_of_data(
    part: Any, ignored: Collection[str] = (), saved: Any = None
) -> Iterator[Attribute]:
    """The attributes of what belongs to a data set or a loader."""
    if isinstance(part, tuple(GENERATORS)):
        yield Attribute("collate_fn", part, saved=saved, is_of_data=True)
        return
    if is_of_library(part):
        return
    names_of_base = {*ignored, *names_of_framework(part)}
    for name, value in (first_numbers(part) | attributes_in(part)).items():
        if name not in names_of_base:
            full_name = f"{type(part).__name__}.{name}"
            yield Attribute(full_name, value, saved=saved, is_of_data=True)


def names_of_framework(part: Any) -> Iterable[str]:
    """The attributes of a module, or of a DataModule, that each of its kind has."""
    if isinstance(part, nn.Module):
        return base_attributes(L.LightningModule)
    if isinstance(part, L.LightningDataModule):
        return vars(L.LightningDataModule())
    return ()


def first_numbers(owner: Any) -> dict[str, Any]:
    """The numbers that the class of an object has for its attributes at first."""
    found = {}
    for kind in reversed(type(owner).__mro__):
        if package_of(kind) in LIBRARIES:
            continue
        for name, value in vars(kind).items():
            if type(value) in (bool, int, float) and not name.startswith("__"):
                found[name] = value
    return found


def parts_of_loader(loader: Any) -> list[Any]:
    """A loader, and what it reads; None for what it does not have."""
    if isinstance(loader, ExactLoader):
        return [loader, *expand(loader.slices)]
    if not isinstance(loader, DataLoader):
        return [loader]
    batches = loader.batch_sampler
    while isinstance(batches, WrappedBatches):
        batches = batches.batches
    samplers = [loader.sampler, batches, getattr(batches, "sampler", None)]
    return [loader, *expand(loader.dataset), *samplers, *expand(collate_fn_of(loader))]


def collate_fn_of(loader: Any) -> Any:
    """The ``collate_fn`` of a loader; None if it has none."""
    function = getattr(loader, "collate_fn", None)
    if isinstance(function, WatchedCollate):
        return function.collate_fn
    return function


def expand(part: Any) -> Iterator[Any]:
    """A data set, and those that it reads if it is one of a library, such as ``Subset``.

    Of a function: what it may change.
    """
    if part is None:
        return
    yield part
    if isinstance(part, FUNCTIONS):
        yield from values_behind(part)
    if not is_of_library(part):
        return
    for inner in parts_of_library(part):
        yield from expand(inner)


def parts_of_library(part: Any) -> list[Any]:
    """What an object of a library calls and reads; None for what it does not have."""
    called = [getattr(part, name, None) for name in CALLED]
    data_sets = getattr(part, "datasets", ())
    # They may have names.
    if isinstance(data_sets, dict):
        data_sets = data_sets.values()
    return [*called, *data_sets, getattr(part, "dataset", None)]


def encode_data(value: Any, elsewhere: Collection[int] = ()) -> Any:
    """A value in a form in which ``has_changed`` compares it."""
    put = partial(fingerprint, max_bytes=BYTES_NAMED)
    return Encoder(elsewhere, put, MAX_NAMED, looks_behind=True).encode(value)


def has_changed(before: Any, now: Any) -> bool:
    """Whether a value that was encoded is another state now.

    What a cache gains is no state: a new key of a dictionary, or a value in the place of None. Nor
    is text: messages, times and paths change.
    """
    kind = kind_of(now)
    if before is None:
        # A generator that the first sample makes has advanced already.
        return kind == "generator"
    if isinstance(before, str) or isinstance(now, str | None):
        return False
    if kind not in COMPOUND or kind_of(before) != kind:
        # As text nan is equal to nan, and 1 differs from True.
        return repr(before) != repr(now)
    # Of a long list only the ends are compared.
    if kind == "items" and have_other_lengths(before, now):
        return True
    return have_changed(before[-1], now[-1])


def kind_of(encoded: Any) -> str:
    """The kind of an encoded value; empty for numbers and text."""
    return str(encoded[0]) if isinstance(encoded, tuple) else ""


def have_other_lengths(before: Any, now: Any) -> bool:
    """Whether these are two lists of different lengths; a dictionary may gain keys."""
    are_lists = not are_pairs([*before[-1], *now[-1]])
    return are_lists and before[-2] != now[-2]


def have_changed(before: list[Any], now: list[Any]) -> bool:
    """The same for the parts of a value."""
    if are_pairs([*before, *now]):
        known = {repr(name): value for *name, value in before}
        return any(has_changed(known.get(repr(name)), value) for *name, value in now)
    if len(before) != len(now):
        return True
    return any(map(has_changed, before, now))


def find_changed(before: dict[str, list[Any]], now: dict[str, list[Any]]) -> list[str]:
    """The names of attributes that are another state now.

    Each has one encoded value for each object of its class.
    """
    changed = []
    for name, values in now.items():
        if have_changed(before.get(name, [None] * len(values)), values):
            changed.append(name)
    return changed


def are_pairs(parts: list[Any]) -> bool:
    """Whether these are names and values, of a dictionary or an object."""
    # No other parts are lists.
    return bool(parts) and all(isinstance(part, list) for part in parts)


class WatchedCollate:
    """The ``collate_fn`` of a loader, in whose first process it compares the data set.

    The names of attributes that change there come to the process that trains by shared memory.

    Args:
        loader: an ordinary DataLoader.
    """

    # A collate_fn, because each batch of any data set goes through it when it has been read.

    def __init__(self, loader: Any) -> None:
        self.collate_fn = loader.collate_fn
        self.worker_init_fn = loader.worker_init_fn
        self._report = torch.zeros(MAX_REPORT, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._num_left = 0
        self._before: dict[str, list[Any]] = {}
        self._changed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        # What the function of the user has, which code of the user may read.
        if name.startswith("__") or "collate_fn" not in vars(self):
            raise AttributeError(name)
        return getattr(self.collate_fn, name)

    def start_process(self, worker_id: int) -> None:
        """Take the place of ``worker_init_fn``, and note what a data set holds at first."""
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        # All processes read by the same code.
        if worker_id == 0:
            self._num_left = NUM_COMPARED
            # To inspect a data set must not end the run.
            with suppress(Exception):
                self._before = self._read()

    def __call__(self, samples: Any) -> Any:
        """Make a batch."""
        batch = self.collate_fn(samples)
        if self._num_left:
            self._num_left -= 1
            with suppress(Exception):
                self._compare()
        return batch

    def names(self) -> list[str]:
        """The names that were reported so far."""
        text = bytes(self._report.tolist()).rstrip(b"\0").decode(errors="ignore")
        return text.splitlines()

    def _read(self) -> dict[str, list[Any]]:
        info: Any = get_worker_info()
        found: dict[str, list[Any]] = {}
        for part in [*expand(info.dataset), *expand(self.collate_fn)]:
            for attribute in attributes_of_data(part):
                found.setdefault(attribute.name, []).append(encode_data(attribute.value))
        return found

    def _compare(self) -> None:
        now = self._read()
        for name in find_changed(self._before, now):
            if name not in self._changed:
                self._changed.append(name)
        self._before = now
        text = "\n".join(self._changed).encode()[:MAX_REPORT]
        if text:
            self._report[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)


def watch(loaders: Iterable[Any]) -> None:
    """Let the processes of these loaders compare their data sets."""
    for loader in without_states(loaders):
        torch_loader = processes_of(loader)
        if torch_loader is None or isinstance(torch_loader.collate_fn, WatchedCollate):
            continue
        starts_over = not torch_loader.persistent_workers
        if isinstance(torch_loader.dataset, IterableDataset) and starts_over:
            # An interrupted epoch is read again by new processes, which do the same.
            continue
        # Without shared memory nothing is compared.
        with suppress(OSError, RuntimeError):
            watched = WatchedCollate(torch_loader)
            vars(torch_loader)["collate_fn"] = watched
            vars(torch_loader)["worker_init_fn"] = watched.start_process


def unwatch(loader: Any) -> None:
    """Give a loader its own functions again."""
    torch_loader = processes_of(loader)
    if torch_loader is not None and isinstance(torch_loader.collate_fn, WatchedCollate):
        watched = torch_loader.collate_fn
        vars(torch_loader)["worker_init_fn"] = watched.worker_init_fn
        vars(torch_loader)["collate_fn"] = watched.collate_fn


def processes_of(loader: Any) -> Any:
    """The DataLoader that has loader processes; None if there are none."""
    if isinstance(loader, ExactLoader):
        return loader.workers
    if isinstance(loader, DataLoader) and loader.num_workers > 0:
        return loader
    return None


def changed_in_processes(loaders: Iterable[Any]) -> set[str]:
    """The names of attributes that have changed in loader processes."""
    names = set[str]()
    for loader in loaders:
        collate: Callable[..., Any] | None = getattr(processes_of(loader), "collate_fn", None)
        if isinstance(collate, WatchedCollate):
            names.update(collate.names())
    return names
