"""Keeps attributes of Python that change while a run trains, and names those it cannot keep."""

import logging
import zlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import lightning as L
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from samestep.callbacks.state_codec import (
    LIBRARIES,
    MISSING,
    NO_STORAGE,
    Decoder,
    Encoder,
    Packed,
    fingerprint,
    is_of_library,
    numbers_in,
    package_of,
    storage_of,
)
from samestep.data.loaders import find_loaders
from samestep.data.sampler import WrappedBatches
from samestep.metrics import EpochMean
from samestep.ranks import compat
from samestep.ranks.process_group import gather
from samestep.ranks.sharded import class_of

log = logging.getLogger(__name__)

MAX_KEPT = 100_000  # items of an attribute that is kept
MAX_NAMED = 1_000  # items that are compared of one that can only be named
BYTES_KEPT = 2**24  # of a tensor that are compared, spread over all of it
BYTES_NAMED = 2**15
MAX_NAMES = 8  # in a note
SAVES = "on_save_checkpoint", "state_dict", "get_extra_state"  # of a module


class Attribute(NamedTuple):
    """An attribute of the module, of its parts, or of what else takes part in the training.

    name: such as ``Model.net.running``.
    can_be_kept: whether its owner allows that.
    saved: what a checkpoint holds of its owner anyway.
    """

    name: str
    value: Any
    can_be_kept: bool = False
    saved: Any = None


class Snapshot(NamedTuple):
    """What the attributes were at one moment, by their names.

    fingerprints: equal if the values are; false if there is nothing in it that could change.
    kept: the values of those that can be kept.
    objects: the ids of what these consist of.
    elsewhere: the ids and places of what a checkpoint holds anyway.
    """

    fingerprints: dict[str, Any]
    kept: dict[str, Any]
    objects: set[int]
    elsewhere: set[int]

    def changed_since(self, before: dict[str, Any]) -> set[str]:
        """The names of the attributes that had other fingerprints."""
        now = self.fingerprints.items()
        return {name for name, new in now if new and new != before.get(name)}


class Attributes(L.Callback):
    """Keeps the attributes of Python that training changes, and names once those it cannot keep.

    A running mean as a float, the hidden state of a recurrent net, a replay buffer, a generator of
    random numbers: an attribute of the module, of its parts or of the user's callbacks that has
    another value than before the first step is part of the checkpoint, of each rank its own. It is
    written back when every ``on_train_start`` is over, in place if it was changed in place. On
    another number of ranks all get the values of rank zero.

    Others are only named: objects that Python code did not make; what data sets and loaders use,
    and attributes of a DataModule, because these may be a batch ahead. A callback or DataModule
    with its own ``on_save_checkpoint`` is trusted, and on one rank so is a module with that,
    ``state_dict`` or ``get_extra_state``. A checkpoint holds the names, and a run that continues
    repeats them before its first step.

    It must be the last callback, so that the others have changed what they change in a step.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        """What cannot be kept, such as ``Model.momentum``."""
        self._before: dict[str, Any] | None = None  # the fingerprints when training began
        self._first: set[int] = set()  # the ids of what existed then
        self._changed: set[str] = set()
        self._saved: list[dict[str, Any]] = []  # of each rank, from a checkpoint
        self._unsaved_buffers: list[str] = []
        self._first_epoch = 0
        self._num_compared = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the buffers with ``persistent=False``, before a strategy cuts up the model."""
        buffers, saved = dict(pl_module.named_buffers()), pl_module.state_dict()
        self._unsaved_buffers = [name for name in buffers if name not in saved]
        self._before = None

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Snapshot: a run that continues has no such check, so what it changes is state."""
        self._before = self._take_snapshot(trainer, pl_module).fingerprints

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what it has changed."""
        now = self._take_snapshot(trainer, pl_module)
        self._changed |= now.changed_since(self._before or {}) & now.kept.keys()

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the first values, write those of the checkpoint, and say what is lost.

        ``samestep.loops`` calls it after every ``on_train_start``: a module may give its attributes
        their first values in its own.
        """
        self._first_epoch, self._num_compared = trainer.current_epoch, 0
        now = self._take_snapshot(trainer, pl_module)
        self._before, self._first = now.fingerprints, now.objects
        self._write(trainer, pl_module)
        if self.lost:
            print_note(
                trainer,
                "this run continues with the first values of these attributes, because no "
                f"checkpoint holds them: {join_names(self.lost)}",
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Name what is lost, after the first batch of the first epoch, and of the second."""
        # In the second one, a loader has begun again, and the module may have told it the epoch.
        if self._num_compared == 2 or not trainer.is_global_zero:
            return
        if trainer.current_epoch - self._first_epoch == self._num_compared:
            self._num_compared += 1
            now = self._take_snapshot(trainer, pl_module)
            self._name_lost(now.changed_since(self._before or {}) - now.kept.keys(), trainer)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what has changed on each rank, each of which must call this."""
        if self._before is None:
            return  # nothing is trained
        now, packed = self._take_snapshot(trainer, pl_module, at_others=False), Packed()
        self._changed |= now.changed_since(self._before)
        # A list may have become too long, or hold other objects.
        self._name_lost(self._changed - now.kept.keys(), trainer)
        kept = {
            name: (
                Encoder(now.elsewhere, packed.put, MAX_KEPT, self._first).encode(value),
                now.fingerprints[name],
            )
            for name, value in now.kept.items()
            if name in self._changed
        }
        checkpoint["attributes"] = gather({"kept": kept, "bytes": packed.joined()})

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember what was kept until training starts."""
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get("attributes", [])

    def state_dict(self) -> dict[str, Any]:
        """What is lost."""
        return {"names": self.lost}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it."""
        self.lost = list(state_dict["names"])

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the attributes the values that they had when the checkpoint was saved."""
        ranks, self._saved = self._saved, []
        if not ranks:
            return
        is_same_number = len(ranks) == trainer.world_size
        own = ranks[trainer.global_rank if is_same_number else 0]
        owners = owners_of(trainer, pl_module)
        decoder, failed = Decoder(own["bytes"], pl_module.device), []
        for name, (read, _) in own["kept"].items():
            path, _, attribute = name.rpartition(".")
            owner = owners.get(path)
            buffers = owner.named_buffers(recurse=False) if isinstance(owner, nn.Module) else ()
            if attribute in dict(buffers) and not is_same_number and len(ranks) > 1:
                continue  # it is the mean over the ranks by now
            try:
                setattr(owner, attribute, decoder.decode(getattr(owner, attribute, MISSING), read))
            except Exception:  # of the owner's code, too
                log.debug("%s cannot be written", name, exc_info=True)
                failed.append(name)
            self._changed.add(name)
        if failed:
            print_note(
                trainer,
                f"the checkpoint holds values of {join_names(failed)} that cannot be given to this "
                "program. The run continues with their first values",
            )
        if is_same_number:
            return
        of_ranks = [{n: print_ for n, (_, print_) in rank["kept"].items()} for rank in ranks]
        if differ := [n for n in own["kept"] if len({of.get(n) for of in of_ranks}) > 1]:
            print_note(
                trainer,
                f"{len(ranks)} ranks had values of their own of {join_names(differ)}. All "
                f"{trainer.world_size} ranks continue with those of rank zero",
            )

    def _name_lost(self, names: set[str], trainer: L.Trainer) -> None:
        if new := sorted(names.difference(self.lost)):
            self.lost += new
            ranks = " of each rank" * (trainer.world_size > 1)
            print_note(
                trainer,
                f"training changes these attributes, and no checkpoint holds them{ranks}: "
                f"{join_names(new)}. A run that resumes starts with their first values. Keep them "
                "by register_buffer, or by state_dict or on_save_checkpoint of their class",
            )

    def _take_snapshot(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, at_others: bool = True
    ) -> Snapshot:
        """Snapshot at the attributes that can be kept, and at others that no checkpoint holds."""
        elsewhere = self._places_in_checkpoint(trainer, pl_module)
        of_data = objects_of_data(trainer, elsewhere)
        # A checkpoint is saved when the next batch has been read already.
        is_ahead = id(pl_module) in of_data
        snapshot = Snapshot({}, {}, set(), elsewhere)
        for name, value, can_be_kept, saved in self._find(trainer, pl_module):
            is_of_module = name.startswith(f"{class_of(pl_module).__name__}.")
            if can_be_kept and not (is_ahead and is_of_module):
                encoder = Encoder(elsewhere, partial(fingerprint, max_bytes=BYTES_KEPT), MAX_KEPT)
                read = encoder.encode(value)
                if encoder.is_whole and of_data.isdisjoint(encoder.objects):
                    snapshot.fingerprints[name] = zlib.crc32(repr(read).encode()) or 1
                    snapshot.kept[name] = value
                    snapshot.objects.update(encoder.objects)
                    continue
            if not at_others:
                continue
            put = partial(fingerprint, max_bytes=BYTES_NAMED)
            of_value, of_saved = (
                [*numbers_in(Encoder(elsewhere, put, MAX_NAMED).encode(one))]
                for one in (value, saved)
            )
            if not set(of_saved).issuperset(of_value):
                snapshot.fingerprints[name] = of_value
        return snapshot

    def _places_in_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule) -> set[int]:
        """The ids of what a checkpoint holds anyway, and the places of the weights in memory."""
        buffers = dict(pl_module.named_buffers())
        unsaved = [buffers.pop(name) for name in self._unsaved_buffers if name in buffers]
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        weights = [*pl_module.parameters(), *buffers.values()]
        parts: list[Any] = [*pl_module.modules(), *trainer.optimizers, *schedules, *weights]
        places = {number for part in parts for number in (id(part), storage_of(part))}
        return places - {storage_of(buffer) for buffer in unsaved} - {NO_STORAGE}

    def _find(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[Attribute]:
        buffers = dict(pl_module.named_buffers())
        for name in self._unsaved_buffers:
            if name in buffers:
                yield Attribute(f"{class_of(pl_module).__name__}.{name}", buffers[name], True)
        for name, owner in owners_of(trainer, pl_module).items():
            if isinstance(owner, L.Callback):
                yield from attributes_of_owner(name, owner, L.Callback)
            else:
                yield from attributes_of_part(name, owner, trainer.world_size)
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None and not is_of_library(data):
            yield from attributes_of_owner(type(data).__name__, data, L.LightningDataModule)
        for loader in find_loaders(trainer.train_dataloader):
            # A loader with a state of its own says what it needs.
            if not hasattr(loader, "load_state_dict"):
                yield from attributes_of_loader(loader, data)


def owners_of(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
    """The module, its parts and the user's callbacks, by their names."""
    name = class_of(pl_module).__name__
    owners: dict[str, Any] = {
        ".".join(filter(None, [name, path])): part for path, part in pl_module.named_modules()
    }
    for callback in compat.callbacks_of(trainer, L.Callback):
        if not is_of_library(callback):
            name = type(callback).__name__
            number = sum(type(owner).__name__ == name for owner in owners.values())
            owners[f"{name} {number + 1}" if number else name] = callback
    return owners


def attributes_of_part(name: str, part: nn.Module, world_size: int) -> Iterator[Attribute]:
    """The attributes of the module or of a part of it."""
    is_module = isinstance(part, L.LightningModule)
    base = L.LightningModule if is_module else nn.Module
    if isinstance(part, Metric | EpochMean) or is_of_library(part):
        return
    # Such a part says itself what a checkpoint holds of it, but on rank zero only.
    saves_itself = any(getattr(type(part), s, None) is not getattr(base, s, None) for s in SAVES)
    if saves_itself and world_size == 1:
        return
    of_base = names_of_base()
    for attribute, value in vars(part).items():
        if attribute not in of_base:
            yield Attribute(f"{name}.{attribute}", value, True)


@cache
def names_of_base() -> set[str]:
    """The attributes that every module has."""
    return set(vars(L.LightningModule()))


def attributes_of_owner(name: str, owner: Any, base: Any) -> Iterator[Attribute]:
    """The attributes of a callback or DataModule, unless it saves itself."""
    hook = getattr(type(owner), "on_save_checkpoint", None)
    if hook is not getattr(base, "on_save_checkpoint", None):
        return
    has_library_parent = any(
        package_of(parent) in LIBRARIES and not issubclass(base, parent)
        for parent in type(owner).__mro__[1:]
    )
    of_base, saved = vars(base()).keys(), owner.state_dict()
    can_be_kept = base is L.Callback and not has_library_parent
    for attribute, value in vars(owner).items():
        if attribute not in of_base and not (has_library_parent and attribute.startswith("_")):
            yield Attribute(f"{name}.{attribute}", value, can_be_kept, saved)


def attributes_of_loader(loader: Any, data: Any) -> Iterator[Attribute]:
    """The attributes of a loader and of what it reads, such as the passes that a data set counts.

    The DataModule may hold them in its ``state_dict``.
    """
    saved = data.state_dict() if data is not None else None
    of_torch = {name for name in getattr(loader, "__dict__", {}) if name.startswith("_")}
    for part in parts_of_loader(loader):
        # Lightning tells a sampler that has ``set_epoch`` the epoch, also after a restart.
        is_told = hasattr(part, "set_epoch") and part is not getattr(loader, "dataset", None)
        if not is_of_library(part) and not is_told:
            for attribute, value in getattr(part, "__dict__", {}).items():
                if part is not loader or attribute not in of_torch:
                    yield Attribute(f"{type(part).__name__}.{attribute}", value, saved=saved)


def parts_of_loader(loader: Any) -> list[Any]:
    """A loader, and what it reads."""
    if not isinstance(loader, DataLoader):
        return [loader]
    batches = loader.batch_sampler
    while isinstance(batches, WrappedBatches):
        batches = batches.batches
    parts = [loader, loader.dataset, loader.sampler, batches, getattr(batches, "sampler", None)]
    return [part for part in parts if part is not None]


def objects_of_data(trainer: L.Trainer, elsewhere: set[int]) -> set[int]:
    """The ids of what the training data consist of: it may change before a step gets its batch."""
    found = set[int]()
    for loader in find_loaders(trainer.train_dataloader):
        for part in [*parts_of_loader(loader), getattr(loader, "collate_fn", None)]:
            for value in [part, *getattr(part, "__dict__", {}).values()]:
                encoder = Encoder(elsewhere, partial(fingerprint, max_bytes=1), MAX_NAMED)
                encoder.encode(value)
                found |= encoder.objects
    return found


def print_note(trainer: L.Trainer, note: str) -> None:
    """Print a note once, for all ranks."""
    if trainer.is_global_zero:
        print(f"Note: {note}", flush=True)


def join_names(names: list[str]) -> str:
    """The names in a sentence."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
