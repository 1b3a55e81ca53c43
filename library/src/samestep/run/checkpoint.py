"""Checkpoints: written atomically, and proved intact by their manifest.

checkpoints/
    best.ckpt               the best so far by the monitored metric
    last.ckpt               to resume from
    last-previous.ckpt      the one before it, in case last.ckpt is damaged
    epoch-0002.ckpt         kept for good, with every_n_epochs=2

Only ``last.ckpt`` is ever written; best.ckpt and epoch-0002.ckpt are second names of it. So the
manifest says what a file is, not its name, and a run resumes from the newest intact file. What a
callback or script of the user saves, here or elsewhere, may hold half of a step: its manifest says
so, and no run resumes from it.

Read in this order: ``AtomicCheckpointIO`` (what Lightning calls), ``load``, ``find_valid`` (where a
run resumes), ``write``, and at the end ``restorable`` (what can be read back without pickle).
"""

import codecs
import copy
import io
import logging
import os
import pickle
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple, Protocol

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.nn.parameter import is_lazy
from torch.serialization import get_crc32_options, safe_globals, set_crc32_options
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment
from samestep.ranks.process_group import on_all_ranks
from samestep.run import manifest, record
from samestep.run.background import BackgroundWriter, MemoryFile
from samestep.run.files import open_atomic, writing
from samestep.run.manifest import Manifest, verify
from samestep.run.record import Record

log = logging.getLogger(__name__)

NEEDED_TO_RESUME = ("state_dict", "loops", "callbacks", "global_step")  # by Lightning
PREVIOUS = "last-previous.ckpt"
NOT_OURS = "not a Samestep checkpoint"
NEW_RUN = "start a new run (another run_dir or RUN_ID)"
OWN_NAMES = re.compile(r"(best|last|last-previous|epoch-\d+)\.ckpt")
# Types that torch reads back without calling any code of the file.
PLAIN = {type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter}
MAX_INT = 1 << 2039  # torch 2.15 cannot read back a whole number of more than 255 bytes
NUMPY_KINDS = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDGSUmM"}
"""The types of NumPy's numbers, texts and times; an array of objects may hold anything."""
NUMPY: list[Any] = [
    np.dtype, np.ndarray, bytes, codecs.encode, *NUMPY_KINDS,
    # What makes a scalar and an array has no public name.
    np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0],
]  # fmt: skip
"""What torch may call to read NumPy's values; none of it runs code of the file."""
OF_LIGHTNING = "state_dict", "optimizer_states", "loops"
"""The parts of a checkpoint in which only the values of tensors count."""
SHARDS = "samestep.plugins.shards"
"""The plug-in that reads a sharded checkpoint; no other needs it."""
Assemble = Callable[[torch.Tensor, int, Callable[[int, int], torch.Tensor]], torch.Tensor]
"""Makes a tensor, given an empty one of its shape (on the device meta), the dimension in which it
was cut, and a function that reads a range of that dimension."""


class CheckpointError(RunError):
    """A checkpoint cannot be read back, or must not be loaded; the message has the remedy."""


class PendingSave(NamedTuple):
    """A checkpoint that a thread of this rank still writes: whole, or this rank's part."""

    written: Future[float]  # how many seconds of a processor it took
    finish: Callable[[], None] | None = None  # what is left when all ranks have written


@dataclass
class DryRun:
    """What a dry run has found: a checkpoint that was made as always, but not written."""

    was_reached: bool = False
    problem: str | None = None
    left_out: list[str] = field(default_factory=list)
    made_plain: list[str] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)


class KeepsObjects(Protocol):
    """Keeps objects out of a checkpoint; see ``samestep.callbacks.stand_ins``."""

    def take_out(self, checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The checkpoint without objects, and their names."""

    def put_back(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint with objects of this program."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, forces it to the disk, and renames it.

    A process that is killed at any moment leaves a valid checkpoint. ``load_checkpoint`` rejects
    files without an intact manifest, files of another run, and pickled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resumes = True
        """Whether a checkpoint that is loaded continues a run; otherwise its weights are enough."""
        self.folder: Path | None = None
        """Where the run keeps its checkpoints; None: all that is saved is the run's."""
        self.saves_for_run = False
        """Whether the run saves, and not a callback or script of the user."""
        self.dry_run: DryRun | None = None
        """If set, a checkpoint is examined, not written."""
        self.assemble: Assemble | None = None
        """Makes the tensors of a sharded checkpoint; None: whole ones."""
        self.stand_ins: KeepsObjects | None = None
        """Keeps the objects of a module apart; None: a checkpoint that has any is rejected."""
        self.in_background = False
        """Whether a save returns while a thread still writes, if there is memory for a copy."""
        self._writer = BackgroundWriter()
        self.pending: PendingSave | None = None
        """What this rank has left to ``commit``."""
        self.lack: str | None = None
        """Why the last save could not be written in the background."""

    def has_room(self, content: dict[str, Any], num_ranks: int) -> bool:
        """Whether so many ranks of this machine can copy what each saves."""
        self.lack = self._writer.find_lack(size_of(content), num_ranks)
        return self.lack is None

    def start(
        self, content: dict[str, Any], target: Path, known: Record, *, is_of_run: bool = True
    ) -> Future[float]:
        """Copy ``content``, and begin to write it to ``target``."""
        copied = self._writer.copy(partial(serialize, content), size_of(content))
        own = describe(content, known, is_of_run=is_of_run)
        return self._writer.start(write_copy, copied, own, target)

    def is_writing(self) -> bool:
        """Whether this rank still writes a checkpoint in the background."""
        return self.pending is not None and not self.pending.written.done()

    def wait(self) -> None:
        """Wait until this rank writes nothing. Whether that failed is for ``commit`` to say."""
        if self.pending is not None:
            self.pending.written.exception()

    def commit(self) -> float:
        """Wait until all ranks have written what they save; then write the rest on rank zero.

        Every rank must call this after each save, and before the next one.

        Returns:
            Seconds of a processor that the thread of this rank has taken to write.

        Raises:
            WriteError: on every rank, if one of them cannot write. Older checkpoints are intact.
        """
        save, self.pending = self.pending, None
        # A checkpoint in one file is written by rank zero alone, and the others learn its errors.
        done: Future[float] = Future()
        done.set_result(0.0)
        seconds = on_all_ranks((save.written if save else done).result)
        if save and save.finish:
            save.finish()
        return seconds

    def teardown(self) -> None:
        """Give back the memory of the copy, after a fit and after an error."""
        self.wait()
        self._writer.release()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, as ``ModelCheckpoint`` does, and its shards."""
        super().remove_checkpoint(Path(path))
        manifest.prune(Path(path).parent)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write ``checkpoint`` to ``path``; an error leaves the older ones intact. On rank zero.

        With ``in_background`` a thread writes it. Every rank must call ``commit`` before the next
        save.
        """
        checkpoint = self.examine(checkpoint)
        if self.dry_run:
            return
        target = Path(path)
        known, is_of_run = self.read_record(target), self.check_place(target)
        if self.in_background and self.has_room(checkpoint, num_ranks=1):
            written = self.start(checkpoint, target, known, is_of_run=is_of_run)
            self.pending = PendingSave(written)
        else:
            write_atomic(checkpoint, target, known, is_of_run=is_of_run)

    def read_record(self, path: Path) -> Record:
        """The record of the run that saves to ``path``, which may be anywhere."""
        return record.read((self.folder or path.parent).parent)

    def check_place(self, path: Path) -> bool:
        """Whether the run itself saves to ``path``.

        Raises:
            ConfigError: if a callback or script would replace a checkpoint of the run.
        """
        if self.folder is None or self.saves_for_run:
            return True
        is_own_name = OWN_NAMES.fullmatch(path.name) is not None
        if is_own_name and path.parent.resolve() == self.folder.resolve():
            raise ConfigError(
                f"save_checkpoint({str(path)!r}): only the run itself writes {path.name} there; "
                "choose another name or folder"
            )
        return False

    def examine(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The part of a checkpoint that can be read back; an error if anything needed cannot.

        A dry run notes the error instead.
        """
        checkpoint, left_out = restorable(checkpoint)
        problem = None
        made_plain: list[str] = []
        what = find_unreadable(checkpoint, "checkpoint")
        if what:
            # Once more without subclasses of tensors, such as those of metrics that were logged.
            checkpoint, made_plain = with_plain_tensors(checkpoint)
            what = find_unreadable(checkpoint, "checkpoint")
        content = checkpoint
        stand_ins: list[str] = []
        if what and self.stand_ins:
            checkpoint, stand_ins = self.stand_ins.take_out(checkpoint)
            what = find_unreadable(checkpoint, "checkpoint")
        if what:
            problem = (
                f"the checkpoint could not be read again: {what}. What a callback, the model or "
                "the data saves must be tensors, arrays, numbers, strings, lists and dictionaries: "
                "convert it in its state_dict or on_save_checkpoint."
            )
        if self.dry_run:
            self.dry_run.was_reached = True
            self.dry_run.problem = problem
            self.dry_run.left_out = left_out
            self.dry_run.made_plain = made_plain
            self.dry_run.stand_ins = stand_ins
            self.dry_run.content = content
        elif problem:
            raise CheckpointError(f"{problem} The checkpoints before it are intact.")
        return checkpoint

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, tensors and numbers only."""
        path = Path(path)
        if self.resumes:
            checkpoint = load(path, NEEDED_TO_RESUME, self.assemble)
        elif is_of_lightning(path):
            return _read_dict(path, ("state_dict",))
        else:
            checkpoint = load(path, assemble=self.assemble)
        return self.stand_ins.put_back(checkpoint) if self.stand_ins else checkpoint


def load(
    path: Path,
    required: tuple[str, ...] = ("state_dict",),
    assemble: Assemble | None = None,
) -> dict[str, Any]:
    """Read the checkpoint at ``path`` onto the CPU, once it is verified and has these keys.

    Tensors that were sharded become whole, unless ``assemble`` makes them.

    Raises:
        CheckpointError: if it is missing, damaged, of another run or role, or not a checkpoint.
    """
    before = manifest.read(path)
    try:
        return _load_once(path, required, assemble)
    except (CheckpointError, OSError):
        # A run that saves meanwhile removes the shards of older checkpoints. Then the file that has
        # replaced this one is read; any other error would only repeat.
        was_replaced = before and before.shards and manifest.read(path) != before
        if not was_replaced:
            raise
        return _load_once(path, required, assemble)


def _load_once(path: Path, required: tuple[str, ...], assemble: Assemble | None) -> dict[str, Any]:
    # If each rank reads its own shards, all ranks together verify all of them.
    files = slice(None)
    if assemble:
        files = slice(environment.rank(), None, environment.world_size())
    found = verify(path, record.read(path.parent.parent), files)
    if isinstance(found, str):
        raise unusable(path, found)
    checkpoint = _read_dict(path, required)
    if checkpoint.get("shards") != found.shards:
        raise unusable(path, "it was replaced while it was read")
    if found.shards:
        shard_files = [path.parent / name for name in found.files()]
        checkpoint = import_module(SHARDS).fill(checkpoint, shard_files, assemble)
    return checkpoint


def _read_dict(path: Path, required: tuple[str, ...]) -> dict[str, Any]:
    """The content of a checkpoint. An intact manifest does not prove that torch can read it."""
    try:
        with safe_globals(NUMPY):
            checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise unusable(path, f"{NOT_OURS}: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict):
        kind = type(checkpoint).__name__
        raise unusable(path, f"{NOT_OURS}: contains a {kind}, expected a dictionary")
    missing = [key for key in required if key not in checkpoint]
    if missing:
        raise unusable(path, f"{NOT_OURS}: it has no {', '.join(missing)}")
    return checkpoint


def is_of_lightning(path: Path) -> bool:
    """Whether Lightning itself may have saved a file: it is of no run, and has no manifest.

    In the directory of a run each checkpoint has a manifest, or is damaged.
    """
    is_outside = record.read(path.parent.parent).run_id is None
    return is_outside and path.exists() and manifest.read(path) is None


def read_without_tensors(path: Path) -> dict[str, Any]:
    """A checkpoint whose tensors stay in the file until they are used; empty if it is unreadable.

    Its bytes are not verified: no run may continue from it.
    """
    try:
        with safe_globals(NUMPY):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def find_valid(directory: Path, known: Record | None = None) -> tuple[Path, Manifest] | None:
    """The newest valid checkpoint of a run, with one warning about the others that are not.

    Only files that may be the newest are read to their end.

    Args:
        directory: ``checkpoints/`` of a run.
        known: the record of the run; None reads it from its directory.

    Returns:
        Path and manifest; None if there are no checkpoints at all.

    Raises:
        CheckpointError: if there are checkpoints, and none of them is valid.
    """
    known = known or record.read(directory.parent)
    manifests, wrong = _read_manifests(directory)

    def newness(path: Path) -> tuple[Any, ...]:
        own = manifests[path]
        # Files without a manifest come first, so that they are reported. best.ckpt may be a second
        # name of last.ckpt: then last.ckpt is the one to name.
        age = own.age if own else ()
        return own is None, age, path.name == "last.ckpt", path.name == PREVIOUS

    newest: tuple[Path, Manifest] | None = None
    for path in sorted(manifests, key=newness, reverse=True):
        found = verify(path, known)
        if isinstance(found, Manifest):
            newest = path, found
            break
        wrong[path] = found

    last = directory / "last.ckpt"
    if newest and last not in wrong:
        misplaced = _find_misplacement(last, manifests, newest)
        if misplaced:
            wrong[last] = misplaced
    if not wrong:
        return newest
    _report(wrong, newest)
    return newest


def _read_manifests(directory: Path) -> tuple[dict[Path, Manifest | None], dict[Path, str]]:
    """The manifests of what the run has saved, and what else has the name of such a file."""
    manifests: dict[Path, Manifest | None] = {}
    wrong: dict[Path, str] = {}
    for path in manifest.find_checkpoints(directory):
        own = manifest.read(path)
        if own is None or own.is_of_run:
            manifests[path] = own
        elif OWN_NAMES.fullmatch(path.name):
            # No callback can save under such a name: the file was copied there.
            wrong[path] = "it was not saved by the run itself, and may hold half of a step"
    return manifests, wrong


def _report(wrong: Mapping[Path, str], newest: tuple[Path, Manifest] | None) -> None:
    """Warn of checkpoints that cannot be used, or raise an error if no other is left."""
    lines = "".join(f"\n  {path}: {why}" for path, why in wrong.items())
    if newest is None:
        # Starting over in silence would lose weeks of training that may be repairable.
        raise CheckpointError(
            f"no checkpoint of this run can be used:{lines}\nRestore one, or {NEW_RUN}."
        )
    name, step = newest[0].name, newest[1].global_step
    log.warning("Damaged or misplaced checkpoints:%s\nUsing %s, of step %d", lines, name, step)


def _find_misplacement(
    last: Path, manifests: Mapping[Path, Manifest | None], newest: tuple[Path, Manifest]
) -> str | None:
    """Why last.ckpt cannot be the last one that was saved, although it is intact.

    A save always writes last.ckpt, with a new time in its manifest. So an older one, or a copy of
    the one before, was put there by hand, and the steps after it are lost.
    """
    own = manifests.get(last)
    if own is None:
        return None
    if own.age < newest[1].age:
        return f"it is from step {own.global_step}, and {newest[0].name} is newer"
    if own == manifests.get(last.with_name(PREVIOUS)):
        return f"it is a copy of {PREVIOUS}, and the checkpoint after that is lost"
    return None


def rotate_last(target: Path) -> None:
    """Rename last.ckpt to last-previous.ckpt, just before a new one is renamed to ``target``."""
    # One without a manifest is damaged, and must not replace an intact one.
    if target.name == "last.ckpt" and manifest.read(target):
        target.replace(target.with_name(PREVIOUS))


def write_atomic(
    content: dict[str, Any], target: Path, known: Record, *, is_of_run: bool = True
) -> None:
    """Write ``content`` and its manifest to ``target``, whole or not at all."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with open_target(target, is_of_run=is_of_run) as file:
        write(content, file, known, is_of_run=is_of_run)


@contextmanager
def open_target(target: Path, *, is_of_run: bool) -> Iterator[IO[bytes]]:
    """Open a file that becomes ``target`` when this block ends; the run keeps its last one."""

    def rotate() -> None:
        # A saver of the user has a last.ckpt of its own, and wants one file there.
        if is_of_run:
            rotate_last(target)

    with writing(target), open_atomic(target, before_rename=rotate) as file:
        yield file


def write(
    content: dict[str, Any], file: IO[bytes], known: Record, *, is_of_run: bool = True
) -> None:
    """Write ``content``, as ``torch.load`` reads it, and its manifest to an empty file."""
    hashed = manifest.HashedFile(file)
    serialize(content, hashed)
    hashed.add(describe(content, known, is_of_run=is_of_run))


def write_copy(copied: memoryview, own: Manifest, target: Path) -> None:
    """Write the bytes of a file and its manifest to ``target``, whole or not at all."""
    with copied, writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_target(target, is_of_run=own.is_of_run) as file:
            hashed = manifest.HashedFile(file)
            hashed.write(copied)
            hashed.add(own)


def serialize(content: dict[str, Any], file: manifest.HashedFile | MemoryFile) -> None:
    """Write ``content`` as ``torch.load`` reads it."""
    # CRC-32 takes as long as the writing, and SHA-256 proves more. torch.load does not read it.
    has_crc32 = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(content, file)  # type: ignore[arg-type]
    finally:
        set_crc32_options(has_crc32)


def describe(content: dict[str, Any], known: Record, *, is_of_run: bool) -> Manifest:
    """The manifest of what is saved now, without its SHA-256."""
    return Manifest(
        run_id=known.run_id,
        config=known.configs[-1] if known.configs else None,
        global_step=content.get("global_step", 0),
        best_step=content.get("best_step"),
        saved=datetime.now(UTC).isoformat(),
        shards=content.get("shards"),
        is_of_run=is_of_run,
    )


def unusable(path: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that must not be loaded, with the remedy."""
    remedy = NEW_RUN
    if path.name == "best.ckpt":
        remedy = "train further with a larger max_epochs: the next best checkpoint replaces it"
    return CheckpointError(f"{path} cannot be used: {why}. Restore the file, or {remedy}.")


def find_unreadable(value: Any, place: str) -> str | None:
    """Where ``value`` contains anything that cannot be read back, as a clause; None if nothing.

    torch reads plain values, tensors, and some types more, without calling any code of a file.
    """
    kind = type(value)
    parts: Iterable[tuple[Any, Any]] = ()
    if kind in (dict, OrderedDict):
        parts = value.items()
        for key in value:
            if is_plain(key):
                continue
            found = find_unreadable(key, f"a key of {place}")
            if found:
                return found
    elif kind in (list, tuple):
        parts = enumerate(value)
    else:
        return _find_unreadable_leaf(value, place)
    for key, item in parts:
        # Skipped here and not in the next call: plain values are many, such as the rows of the
        # history, and to format the name of each place would take longer than the rest.
        if is_plain(item):
            continue
        found = find_unreadable(item, f"{place}[{key!r}]")
        if found:
            return found
    return None


def _find_unreadable_leaf(value: Any, place: str) -> str | None:
    if is_plain(value) or is_plain_numpy(value) or _can_be_read_back(value):
        return None
    kind = type(value)
    if kind is int:
        return f"{place} is a whole number of {value.bit_length()} bits"
    return f"{place} is a {kind.__module__}.{kind.__qualname__}"


def is_plain(value: Any) -> bool:
    """Whether torch reads a value back without calling any code of the file."""
    kind = type(value)
    if kind is int:
        return bool(-MAX_INT < value < MAX_INT)
    return kind in PLAIN


def is_plain_numpy(value: Any) -> bool:
    """Whether it is a number or array of NumPy; a callback may save thousands."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return False
    return type(value.dtype) in NUMPY_KINDS


def with_plain_tensors(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The checkpoint with tensors in the place of tensor subclasses, such as MONAI's MetaTensor.

    Returns:
        It, and where the user has saved one, whose other attributes are lost.
    """
    places: list[str] = []

    def make_plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
        plain = plain_tensor(tensor)
        top, _, place = path.removeprefix("/").partition("/")
        if plain is not tensor and top not in OF_LIGHTNING:
            places.append(f"{place or top} ({type(tensor).__qualname__})")
        return plain

    return map_tensors(checkpoint, make_plain), places


def map_tensors(
    value: Any, function: Callable[[str, torch.Tensor], torch.Tensor], path: str = ""
) -> Any:
    """Copy a tree of dictionaries and lists, with ``function`` of each tensor and its path."""
    if isinstance(value, dict):
        # With the versions that a state_dict has as an attribute.
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, function, f"{path}/{key}")
        return copied
    # Not a named tuple, which takes its items as separate arguments.
    if type(value) in (list, tuple):
        items = (map_tensors(item, function, f"{path}/{i}") for i, item in enumerate(value))
        return type(value)(items)
    if isinstance(value, torch.Tensor):
        return function(path, value)
    return value


def size_of(checkpoint: dict[str, Any]) -> int:
    """The bytes of all tensors in a checkpoint, without sparse ones, which do not say theirs."""
    sizes: list[int] = []

    def add(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            sizes.append(tensor.nbytes)
        return tensor

    map_tensors(checkpoint, add)
    return sum(sizes)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without the class and the attributes of a subclass.

    A subclass that consists of other tensors, such as a quantized one, has no values of its own.
    """
    if type(tensor) in PLAIN or is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
        return tensor
    return tensor.detach().as_subclass(torch.Tensor)


def _can_be_read_back(value: Any) -> bool:
    # By trying: torch has no public list of the types that it allows. Few values get here, and they
    # are small.
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        with safe_globals(NUMPY):
            torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError):
        return False
    return True


def restorable(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The checkpoint without hyperparameters that cannot be read back, and their names.

    A net or an encoder among the hyperparameters is no reason to stop: a run builds its model from
    the configuration. Only Lightning's ``load_from_checkpoint`` needs them, as arguments.
    """
    checkpoint, left_out = dict(checkpoint), []
    for part in (L.LightningModule, L.LightningDataModule):
        saved = checkpoint.get(part.CHECKPOINT_HYPER_PARAMS_KEY)
        if saved is None:
            continue
        kept = {}
        for name, value in to_plain(saved).items():
            # An array is readable here, but not for Lightning's load_from_checkpoint.
            is_array = isinstance(value, np.ndarray)
            if is_array or find_unreadable(value, name):
                left_out.append(f"{name} ({type(value).__qualname__})")
            else:
                kept[name] = value
        checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = kept
        # The class of the saved hyperparameters, such as Namespace: now they are a dictionary.
        checkpoint.pop(part.CHECKPOINT_HYPER_PARAMS_TYPE, None)
    return checkpoint, left_out


def to_plain(value: Any) -> Any:
    """The value with plain containers, paths as text, and Python's numbers for NumPy's."""
    if isinstance(value, Namespace):
        return to_plain(vars(value))
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, MutableSequence):  # OmegaConf's too
        return [*map(to_plain, value)]
    # Not a subclass: a named tuple takes its items as separate arguments.
    if type(value) is tuple:
        return tuple(map(to_plain, value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return value
