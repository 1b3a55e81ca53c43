"""Keeps attributes of Python that change while a run trains, and names those it cannot keep."""

import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
from torch import Tensor, nn
from torchmetrics import Metric

from samestep.callbacks.loader_state import (
    BYTES_NAMED,
    MAX_NAMED,
    Attribute,
    attributes_in,
    attributes_of_loader,
    changed_in_processes,
    collate_fn_of,
    encode_data,
    find_changed,
    own_attributes,
    parts_of_loader,
    private_names,
    saved_state,
)
from samestep.callbacks.notes import join_names, note_rank_zero_counts, print_note
from samestep.callbacks.state_codec import (
    LIBRARIES,
    NO_STORAGE,
    Decoder,
    Encoder,
    LivingIds,
    Packed,
    attribute_of,
    base_attributes,
    fingerprint,
    is_buffer,
    is_of_library,
    numbers_in,
    package_of,
    set_attribute,
    storage_of,
)
from samestep.data.loaders import find_loaders, without_states
from samestep.ranks import compat, epoch_logs
from samestep.ranks.epoch_sums import EpochSums
from samestep.ranks.process_group import gather
from samestep.ranks.sharded import class_of

log = logging.getLogger(__name__)

MAX_ASKED = 64  # batches after which loader processes are asked what has changed there
MAX_KEPT = 100_000  # items of an attribute that is kept
BYTES_KEPT = 2**24  # of a tensor that are compared, spread over all of it
SAVES = "on_save_checkpoint", "state_dict", "get_extra_state"  # of a module


@dataclass
class Snapshot:
    """The values of the attributes at one moment, by their names."""

    elsewhere: set[int]
    """The ids and storage addresses of what a checkpoint holds anyway."""
    fingerprints: dict[str, Any] = field(default_factory=dict)
    """Equal if the values are; false if there is nothing in it that could change."""
    kept: dict[str, Any] = field(default_factory=dict)
    """The values that can be kept."""
    data: dict[str, list[Any]] = field(default_factory=dict)
    """What data sets and loaders have: encoded values, one for each object of a class."""
    objects: dict[int, Any] = field(default_factory=dict)
    """What the kept values consist of, by its id."""

    def keep(self, attribute: Attribute, of_data: set[int]) -> bool:
        """Add an attribute that can be kept; False if its value does not allow it.

        Args:
            attribute: to be added.
            of_data: ids of what the training data consist of.
        """
        put = partial(fingerprint, max_bytes=BYTES_KEPT)
        encoder = Encoder(self.elsewhere, put, MAX_KEPT)
        encoded = encoder.encode(attribute.value)
        # A value that the data share may already be one batch ahead when a checkpoint is saved.
        if not encoder.is_complete or not of_data.isdisjoint(encoder.objects):
            return False
        # Zero would say that nothing in it could change.
        self.fingerprints[attribute.name] = zlib.crc32(repr(encoded).encode()) or 1
        self.kept[attribute.name] = attribute.value
        self.objects.update(encoder.objects)
        return True

    def compare_only(self, attribute: Attribute) -> None:
        """Add an attribute that can only be named if it changes."""
        numbers = self._numbers(attribute.value)
        saved = self._numbers(attribute.saved)
        # Its owner saves it itself, under whatever name.
        if set(saved).issuperset(numbers):
            return
        if attribute.is_of_data:
            encoded = encode_data(attribute.value, self.elsewhere)
            self.data.setdefault(attribute.name, []).append(encoded)
        else:
            self.fingerprints[attribute.name] = numbers

    def _numbers(self, value: Any) -> list[object]:
        # Without text: messages, times and paths change without being state.
        put = partial(fingerprint, max_bytes=BYTES_NAMED)
        return list(numbers_in(Encoder(self.elsewhere, put, MAX_NAMED).encode(value)))

    def changed_since(self, before: dict[str, Any]) -> set[str]:
        """The names of the attributes that had other fingerprints."""
        changed = set()
        for name, new in self.fingerprints.items():
            if new and new != before.get(name):
                changed.add(name)
        return changed


class Attributes(L.Callback):
    """Keeps the attributes of Python that training changes, and names once those it cannot keep.

    A running mean as a float, the hidden state of a recurrent net, a replay buffer, a random
    generator: an attribute of the module, of its parts or of the user's callbacks that has another
    value than before the first step is part of the checkpoint, for each rank its own. It is
    restored after every ``on_train_start``, in place if it was changed in place. On another number
    of ranks all ranks get the values of rank zero.

    Others are only named: objects that Python code did not make; what data sets and loaders use,
    and attributes of a DataModule, because these may be a batch ahead. A callback or DataModule
    with its own ``on_save_checkpoint`` is trusted, and on one rank so is a module with that,
    ``state_dict`` or ``get_extra_state``. A checkpoint holds the names, and a run that resumes
    repeats them before its first step.

    It must be the last callback, so that the others have changed what they change in a step.
    """

    def __init__(self) -> None:
        self.lost: list[str] = []
        """What cannot be kept, such as ``Model.momentum``."""
        self._before: dict[str, Any] | None = None  # the fingerprints when training began
        self._data: dict[str, list[Any]] = {}  # what data sets had when they were compared last
        self._first = LivingIds()  # of what existed then
        self._changed: set[str] = set()
        self._saved: list[dict[str, Any]] = []  # of each rank, from a checkpoint
        self._unsaved_buffers: list[str] = []
        self._first_epoch = 0
        self._num_compared = 0
        self._num_asked = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Note the buffers with ``persistent=False``, before a strategy shards the model."""
        saved = pl_module.state_dict()
        self._unsaved_buffers = [n for n, _ in pl_module.named_buffers() if n not in saved]
        self._before = None

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the values before Lightning validates some batches."""
        self._before = self._take_snapshot(trainer, pl_module).fingerprints

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note what has changed: a run that resumes skips this validation."""
        now = self._take_snapshot(trainer, pl_module)
        self._changed |= now.changed_since(self._before or {}) & now.kept.keys()

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the first values, restore the saved ones, and print what is lost.

        ``samestep.loops`` calls it after every ``on_train_start``, in which a module may give its
        attributes their first values.
        """
        self._first_epoch = trainer.current_epoch
        self._num_compared = 0
        self._num_asked = 0
        now = self._take_snapshot(trainer, pl_module)
        self._before = now.fingerprints
        self._data = now.data
        self._first = LivingIds(now.objects.values())
        self._restore(trainer, pl_module)
        name_in_note(
            trainer,
            "this run continues with the first values of these attributes, because no checkpoint "
            "holds them: ",
            self.lost,
        )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        """Name what is lost, after the first batch of the first epoch, and of the second."""
        # Two comparisons, because each takes time. In the second epoch a loader has started over,
        # and the module may have told it the epoch.
        if not trainer.is_global_zero:
            return
        if self._num_asked < MAX_ASKED:
            self._num_asked += 1
            self._name_lost(changed_in_processes(find_loaders(trainer.train_dataloader)), trainer)
        if self._num_compared == 2:
            return
        if trainer.current_epoch - self._first_epoch == self._num_compared:
            self._num_compared += 1
            now = self._take_snapshot(trainer, pl_module)
            changed = now.changed_since(self._before or {}) - now.kept.keys()
            self._name_lost(changed.union(find_changed(self._data, now.data)), trainer)
            # A cache that was filled since is compared from now on.
            self._data = now.data

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what has changed on each rank, each of which must call this."""
        # Nothing is trained, or not yet: another callback may save before the first step.
        if self._before is None:
            return
        now = self._take_snapshot(trainer, pl_module, with_others=False)
        self._changed |= now.changed_since(self._before)
        # A list may have become too long, or hold other objects.
        self._name_lost(self._changed - now.kept.keys(), trainer)
        packed = Packed()
        kept = {}
        for name, value in now.kept.items():
            if name in self._changed:
                encoder = Encoder(now.elsewhere, packed.put, MAX_KEPT, self._first)
                kept[name] = encoder.encode(value), now.fingerprints[name]
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
        """Restore what is lost."""
        self.lost = list(state_dict["names"])

    def _restore(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the attributes the values that they had when the checkpoint was saved."""
        ranks, self._saved = self._saved, []
        if not ranks:
            return
        is_same_number = len(ranks) == trainer.world_size
        own = ranks[trainer.global_rank] if is_same_number else ranks[0]
        owners = find_owners(trainer, pl_module)
        decoder = Decoder(own["bytes"], pl_module.device)
        # ``RankState`` gives a buffer the mean over the ranks that saved it; one rank saves none.
        have_mean = len(ranks) not in (1, trainer.world_size)
        failed = []
        unequal = find_unequal(ranks)
        for name, (encoded, _) in own["kept"].items():
            path, _, attribute = name.rpartition(".")
            owner = owners.get(path)
            if have_mean and is_buffer(owner, attribute):
                # ``RankState`` says what has none.
                unequal.pop(name, None)
                continue
            if not restore_attribute(owner, attribute, encoded, decoder):
                failed.append(name)
            self._changed.add(name)
        name_in_note(
            trainer,
            "the checkpoint holds values of ",
            failed,
            " that cannot be restored in this program. The run continues with their first values",
        )
        if not is_same_number:
            note_rank_zero_counts(trainer, [*unequal], len(ranks))

    def _name_lost(self, names: set[str], trainer: L.Trainer) -> None:
        new = sorted(names.difference(self.lost))
        self.lost += new
        ranks = " of each rank" if trainer.world_size > 1 else ""
        name_in_note(
            trainer,
            f"training changes these attributes, and no checkpoint holds them{ranks}: ",
            new,
            ". A run that resumes starts with their first values. Keep them by register_buffer, "
            "or by state_dict or on_save_checkpoint of their class",
        )

    def _take_snapshot(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *, with_others: bool = True
    ) -> Snapshot:
        """Read the attributes that can be kept, and others that no checkpoint holds."""
        snapshot = Snapshot(self._find_saved(trainer, pl_module))
        of_data = find_objects_of_data(trainer, snapshot.elsewhere)
        # A loader that calls the module, as ``collate_fn=self.collate`` does, has already read the
        # next batch when a checkpoint is saved.
        is_ahead = id(pl_module) in of_data
        prefix = f"{class_of(pl_module).__name__}."
        for attribute in self._find_attributes(trainer, pl_module):
            may_be_ahead = is_ahead and attribute.name.startswith(prefix)
            if attribute.can_be_kept and not may_be_ahead and snapshot.keep(attribute, of_data):
                continue
            if with_others:
                snapshot.compare_only(attribute)
        return snapshot

    def _find_saved(self, trainer: L.Trainer, pl_module: L.LightningModule) -> set[int]:
        """The ids and storage addresses of what a checkpoint holds anyway."""
        buffers = dict(pl_module.named_buffers())
        unsaved = self._find_unsaved(pl_module)
        for name in unsaved:
            del buffers[name]
        saved: list[Any] = [*pl_module.modules(), *pl_module.parameters(), *buffers.values()]
        saved += trainer.optimizers
        saved += [config.scheduler for config in trainer.lr_scheduler_configs]
        found = set()
        for part in saved:
            found.add(id(part))
            # A detached weight is another object with the same memory.
            found.add(storage_of(part))
        found.discard(NO_STORAGE)
        # An unsaved buffer may be a view of a saved one, and is kept on its own.
        return found.difference(map(storage_of, unsaved.values()))

    def _find_unsaved(self, pl_module: L.LightningModule) -> dict[str, Tensor]:
        """The buffers with ``persistent=False``, where the module has not removed them since."""
        buffers = dict(pl_module.named_buffers())
        return {name: buffers[name] for name in self._unsaved_buffers if name in buffers}

    def _find_attributes(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> Iterator[Attribute]:
        prefix = class_of(pl_module).__name__
        for name, buffer in self._find_unsaved(pl_module).items():
            yield Attribute(f"{prefix}.{name}", buffer, True)
        for name, owner in find_owners(trainer, pl_module).items():
            if isinstance(owner, L.Callback):
                yield from attributes_of_owner(name, owner, L.Callback)
            else:
                yield from attributes_of_part(name, owner, trainer.world_size)
        data = trainer.datamodule  # type: ignore[attr-defined]
        # A run without a DataModule has None here, whose class is of Python's library.
        if not is_of_library(data):
            name = type(data).__name__
            for attribute in attributes_of_owner(name, data, L.LightningDataModule):
                yield attribute._replace(is_of_data=True)
        # A loader with state_dict and load_state_dict saves what it needs.
        for loader in without_states(find_loaders(trainer.train_dataloader)):
            yield from attributes_of_loader(loader, data, pl_module)


def find_owners(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
    """The module, its parts and the user's callbacks, by their names."""
    root = class_of(pl_module).__name__
    owners: dict[str, Any] = dict(pl_module.named_modules(prefix=root))
    numbers = Counter([root])
    for callback in compat.callbacks_of(trainer, L.Callback):
        if is_of_library(callback):
            continue
        name = type(callback).__name__
        numbers[name] += 1
        # Callbacks of one class are numbered, so that a name finds the same one after a restart.
        owners[f"{name} {numbers[name]}" if numbers[name] > 1 else name] = callback
    return owners


def attributes_of_part(name: str, part: nn.Module, world_size: int) -> Iterator[Attribute]:
    """The attributes of the module or of a part of it."""
    if isinstance(part, Metric):
        # ``RankState`` saves what it counts in, which can be summed up over the ranks.
        counts = base_attributes(Metric) | epoch_logs.counts_of(part)
        yield from own_attributes(name, part, counts, can_be_kept=True)
        return
    # ``RankState`` saves these too, and nets of torch only have parameters and buffers.
    if isinstance(part, EpochSums) or is_of_library(part):
        return
    # A part that overrides these hooks chooses its own state, but only rank zero saves it.
    if world_size == 1 and saves_itself(part):
        return
    yield from own_attributes(name, part, base_attributes(L.LightningModule), can_be_kept=True)


def saves_itself(part: nn.Module) -> bool:
    """Whether the class of a module overrides what a checkpoint holds of it."""
    base = L.LightningModule if isinstance(part, L.LightningModule) else nn.Module
    return any(getattr(type(part), hook, None) is not getattr(base, hook, None) for hook in SAVES)


def attributes_of_owner(name: str, owner: Any, base: Any) -> Iterator[Attribute]:
    """The attributes of a callback or DataModule, unless it saves itself."""
    hook = getattr(type(owner), "on_save_checkpoint", None)
    # A LightningDataModule has no such hook of its own.
    if hook is not getattr(base, "on_save_checkpoint", None):
        return
    has_library_parent = any(
        package_of(parent) in LIBRARIES and not issubclass(base, parent)
        for parent in type(owner).__mro__[1:]
    )
    ignored = set(vars(base()))
    # Private attributes belong to the parent class in Lightning, which saves what it needs.
    if has_library_parent:
        ignored |= private_names(owner)
    can_be_kept = base is L.Callback and not has_library_parent
    yield from own_attributes(name, owner, ignored, can_be_kept, saved_state(owner))


def find_objects_of_data(trainer: L.Trainer, elsewhere: set[int]) -> set[int]:
    """The ids of what the training data consist of: it may change before a step gets its batch."""
    found = set[int]()
    for loader in find_loaders(trainer.train_dataloader):
        for part in [*parts_of_loader(loader), collate_fn_of(loader)]:
            for value in [part, *attributes_in(part).values()]:
                # Only its ids count, so one byte of a tensor is enough.
                encoder = Encoder(elsewhere, partial(fingerprint, max_bytes=1), MAX_NAMED)
                encoder.encode(value)
                found |= encoder.objects.keys()
    return found


def restore_attribute(owner: Any, attribute: str, encoded: Any, decoder: Decoder) -> bool:
    """Give one attribute its saved value; False if that is not possible."""
    try:
        value = decoder.decode(attribute_of(owner, attribute), encoded)
        set_attribute(owner, attribute, value)
    # The owner may be gone, and code of its values may raise anything.
    except Exception:
        log.debug("%s of %s cannot be restored", attribute, type(owner).__name__, exc_info=True)
        return False
    return True


def find_unequal(ranks: list[dict[str, Any]]) -> dict[str, bool]:
    """The names of the attributes that rank zero has kept, and of which other ranks differ."""
    # In their order, from which some are taken.
    unequal = {}
    for name, (_, own) in ranks[0]["kept"].items():
        of_ranks = [rank["kept"].get(name, (None, None))[1] for rank in ranks]
        if of_ranks.count(own) < len(ranks):
            unequal[name] = True
    return unequal


def name_in_note(trainer: L.Trainer, before: str, names: list[str], after: str = "") -> None:
    """Print a note with these names in it, if there are any."""
    if names:
        print_note(trainer, f"Note: {before}{join_names(names)}{after}")
