"""Checkpoints that are written atomically and prove themselves by their manifest.

checkpoints/
    best.ckpt               the best so far by the monitored metric
    last.ckpt               to continue from
    last-previous.ckpt      the one before it, should last.ckpt be damaged
    epoch-0002.ckpt         one to keep, with callbacks.checkpoints.every_n_epochs=2

Only ``last.ckpt`` is ever written; best.ckpt and epoch-0002.ckpt are second names of it. So what a
file is follows from its manifest, not from its name: a run resumes from the newest intact file.
"""

import io
import logging
import os
import pickle
import secrets
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.serialization import get_crc32_options, set_crc32_options

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment
from samestep.ranks.process_group import broadcast, on_all_ranks
from samestep.run import manifest, record, shards
from samestep.run.files import open_atomic, writing
from samestep.run.manifest import Manifest, verify
from samestep.run.record import Record

log = logging.getLogger(__name__)

TO_CONTINUE = ("state_dict", "loops", "callbacks", "global_step")  # what Lightning needs
PREVIOUS = "last-previous.ckpt"
PLAIN = {type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter}


class CheckpointError(RunError):
    """A checkpoint could not be read again, or must not be loaded; the message says what to do."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, forces it to the disk, and renames it.

    A process that is killed at any moment leaves a valid checkpoint. ``load_checkpoint`` refuses
    files without an intact manifest, files of another run, and pickled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of the model's tensors, which a checkpoint must have; empty: not checked."""
        self.dry_run: DryRun | None = None
        """If set, a checkpoint is examined and not written."""
        self.assemble: shards.Assemble | None = None
        """How the tensors of a sharded checkpoint are made; None: whole."""
        self.in_background = False
        """Whether ``save_part`` returns while a thread still writes."""
        self._writer = ThreadPoolExecutor(1)
        self.pending: PendingSave | None = None
        """What ``save_part`` has left to ``commit``."""

    def save_part(
        self, checkpoint: dict[str, Any], part: dict[str, torch.Tensor], path: str | Path
    ) -> None:
        """Write a sharded checkpoint: first every rank its part, then rank zero the rest.

        With ``in_background`` a thread writes the part, and the rest waits for ``commit``, which
        must come before the next save. The tensors of the part must stay as they are until then.
        """
        folder, rank, num_ranks = Path(path).parent, environment.rank(), environment.world_size()
        step = checkpoint["global_step"]
        name = broadcast(f"shards-{step}-{num_ranks}-{secrets.token_hex(4)}")
        rest = checkpoint | {"shards": name}
        if self.dry_run:
            if rank == 0:
                self.save_checkpoint(rest, path)
            return
        target = folder / name / f"{rank}.shard"
        content = {"tensors": part, "global_step": step, "shards": f"{name}/{target.name}"}
        known, file = record.read(folder.parent), io.BytesIO()
        if rank == 0:
            write(self._examine(rest), file, known)
        written = self._writer.submit(write_atomic, content, target, known)
        self.pending = PendingSave(Path(path), file.getvalue(), written)
        if not self.in_background:
            self.commit()

    def is_writing(self) -> bool:
        """Whether this rank still writes its part of a checkpoint in the background."""
        return self.pending is not None and not self.pending.written.done()

    def commit(self) -> None:
        """Wait until all ranks have written their parts; then rank zero writes the rest.

        Every rank must call this. Nothing happens if ``save_part`` has left nothing.

        Raises:
            WriteError: on every rank, if one of them cannot write. Older checkpoints are intact.
        """
        if self.pending is None:
            return
        (path, rest, written), self.pending = self.pending, None
        on_all_ranks(written.result)
        if environment.rank() == 0:
            with writing(path), open_atomic(path, before_rename=lambda: rotate_last(path)) as file:
                file.write(rest)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, as ``ModelCheckpoint`` does, and its shards."""
        super().remove_checkpoint(Path(path))
        shards.prune(Path(path).parent)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write ``checkpoint`` to ``path``; an error leaves the older ones intact. On rank zero."""
        checkpoint = self._examine(checkpoint)
        if not self.dry_run:
            target = Path(path)
            write_atomic(checkpoint, target, record.read(target.parent.parent))

    def _examine(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What of the checkpoint can be read again; an error if something cannot.

        A trial notes the error instead.
        """
        checkpoint, left_out = restorable(checkpoint)
        problem = None
        if what := find_unreadable(checkpoint, "checkpoint"):
            problem = (
                f"the checkpoint could not be read again: {what}. What a callback, the model or "
                "the data saves must be tensors, numbers, strings, lists and dictionaries: "
                "convert it in its state_dict or on_save_checkpoint."
            )
        if self.dry_run:
            self.dry_run.was_reached, self.dry_run.problem = True, problem
            self.dry_run.left_out = left_out
        elif problem:
            raise CheckpointError(f"{problem} The checkpoints before it are intact.")
        return checkpoint

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read what ``save_checkpoint`` wrote, tensors and numbers only, if it fits the model."""
        checkpoint = load(Path(path), TO_CONTINUE, self.assemble)
        weights = checkpoint["state_dict"]
        for name, shape in self.shapes.items():
            found = weights[name].shape if name in weights else None
            if found == shape:
                continue
            why = f"it has no {name}"
            if found is not None:
                why = f"{name} has the shape {list(found)} instead of {list(shape)}"
            raise ConfigError(
                f"{path} does not fit this model: {why}. Use the configuration "
                "that it was trained with, or start over under another RUN_ID"
            )
        return checkpoint


def load(
    path: Path,
    required: tuple[str, ...] = ("state_dict",),
    assemble: shards.Assemble | None = None,
) -> dict[str, Any]:
    """Read the checkpoint at ``path`` onto the CPU, once it is verified and has these keys.

    Tensors that were sharded are whole, unless ``assemble`` makes them. A run that saves meanwhile
    removes the shards of older checkpoints: then the file that has replaced this one is read.

    Raises:
        CheckpointError: if it is missing, damaged, of another run or role, or no checkpoint.
    """
    before = manifest.read(path)
    try:
        return load_once(path, required, assemble)
    except (CheckpointError, OSError):
        if not before or not before.shards or manifest.read(path) == before:
            raise
        return load_once(path, required, assemble)


def load_once(
    path: Path, required: tuple[str, ...], assemble: shards.Assemble | None
) -> dict[str, Any]:
    """``load`` the file that is there now."""
    # Where each rank reads a part, all ranks together verify all of it.
    own = slice(environment.rank(), None, environment.world_size()) if assemble else slice(None)
    found = verify(path, record.read(path.parent.parent), own)
    if isinstance(found, str):
        raise unusable(path, found)
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = f"it is no Samestep checkpoint: {str(error).splitlines()[0]}"
        raise unusable(path, why) from error
    if not isinstance(checkpoint, dict):
        kind = type(checkpoint).__name__
        raise unusable(path, f"it is no Samestep checkpoint: it holds a {kind}")
    if missing := [key for key in required if key not in checkpoint]:
        raise unusable(path, f"it is no Samestep checkpoint: it has no {', '.join(missing)}")
    if checkpoint.get("shards") != found.shards:
        raise unusable(path, "it was replaced while it was read")
    if found.shards:
        files = [path.parent / name for name in found.files()]
        checkpoint = shards.fill(checkpoint, files, assemble)
    whole: dict[str, Any] = checkpoint
    return whole


def find_valid(directory: Path, known: Record | None = None) -> tuple[Path, Manifest] | None:
    """The newest valid checkpoint of a run, with one warning about what is wrong with others.

    Only files that may be the newest are read to their end. ``known`` is the record of the run;
    None reads it from its directory. It is None if there are no checkpoints at all; an error, if
    there are some and none is valid.
    """
    known = known or record.read(directory.parent)
    manifests = {path: manifest.read(path) for path in sorted(directory.glob("[!.]*.ckpt"))}
    last, previous = directory / "last.ckpt", directory / PREVIOUS

    def newness(path: Path) -> tuple[Any, ...]:
        # A file without a manifest comes first, to be named. If two names have one file, last.ckpt
        # counts.
        own = manifests[path]
        return own is None, own.age if own else (), path == last, path == previous

    newest: tuple[Path, Manifest] | None = None
    wrong: dict[Path, str] = {}
    for path in sorted(manifests, key=newness, reverse=True):
        found = verify(path, known)
        if isinstance(found, Manifest):
            newest = path, found
            break
        wrong[path] = found
    # Each save has another manifest, and last.ckpt is always the newest unless it was replaced.
    if newest and last not in wrong and (own := manifests.get(last)):
        if own.age < newest[1].age:
            wrong[last] = f"it is from step {own.global_step}, and {newest[0].name} is newer"
        elif own == manifests.get(previous):
            wrong[last] = f"it is a copy of {PREVIOUS}, and the checkpoint after that is lost"
    if not wrong:
        return newest
    lines = "".join(f"\n  {path}: {why}" for path, why in wrong.items())
    if newest is None:
        raise CheckpointError(
            f"no checkpoint of this run can be used:{lines}\n"
            "Restore one, or start over under another RUN_ID."
        )
    name, step = newest[0].name, newest[1].global_step
    log.warning("Damaged or misplaced checkpoints:%s\nUsing %s, of step %d", lines, name, step)
    return newest


def rotate_last(target: Path) -> None:
    """Keep the last checkpoint as the one before, when another one is about to take its name.

    A last checkpoint without a manifest is damaged, and does not replace the one before.
    """
    if target.name == "last.ckpt" and manifest.read(target):
        target.replace(target.with_name(PREVIOUS))


def write_atomic(content: dict[str, Any], target: Path, known: Record) -> None:
    """Write ``content`` to ``target`` with its manifest, whole or not at all."""
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(target, before_rename=lambda: rotate_last(target)) as file:
            write(content, file, known)


def write(content: dict[str, Any], file: IO[bytes], known: Record) -> None:
    """Write ``content`` to an empty file as ``torch.load`` reads it, with its manifest."""
    hashed = manifest.HashedFile(file)
    # CRC-32 takes as long as the writing, and SHA-256 proves more. torch.load does not read it.
    has_crc32 = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(content, hashed)  # type: ignore[arg-type]
    finally:
        set_crc32_options(has_crc32)
    config = known.configs[-1] if known.configs else None
    step, best_step = content.get("global_step", 0), content.get("best_step")
    now = datetime.now(UTC).isoformat()
    hashed.add(Manifest(known.run_id, config, step, best_step, now, shards=content.get("shards")))


class PendingSave(NamedTuple):
    """A sharded checkpoint that a thread writes."""

    path: Path
    rest: bytes  # all but the shards, which only rank zero has
    written: Future[None]  # this rank's part


@dataclass
class DryRun:
    """What a trial has found: a checkpoint that was made like any other, and not written."""

    was_reached: bool = False
    problem: str | None = None
    left_out: list[str] = field(default_factory=list)


def find_unreadable(value: Any, place: str) -> str | None:
    """Where ``value`` holds what could never be read again, as a clause; None if it holds nothing.

    torch reads plain values, tensors, and some types more, without calling any code of a file.
    Values of other types are written and read here, one by one: they are few and small.
    """
    kind = type(value)
    parts: Iterable[tuple[Any, Any]] = ()
    if kind in (dict, OrderedDict):
        parts = value.items()
        keys = (key for key in value if type(key) not in PLAIN)
        if found := next((find_unreadable(key, f"a key of {place}") for key in keys), None):
            return found
    elif kind in (list, tuple):
        parts = enumerate(value)
    elif kind not in PLAIN:
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError, RuntimeError):
            return f"{place} is a {kind.__module__}.{kind.__qualname__}"
    # Plain values are many, such as the rows of the history, and a place takes time to write.
    inside = (
        find_unreadable(item, f"{place}[{key!r}]") for key, item in parts if type(item) not in PLAIN
    )
    return next((found for found in inside if found), None)


def restorable(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The checkpoint with such hyperparameters only as can be read again, and what was left out.

    A run builds its model from the configuration, not from them, so one that is a net or an encoder
    need not end it. Lightning's ``load_from_checkpoint`` wants those as arguments.
    """
    checkpoint, left_out = dict(checkpoint), []
    for part in (L.LightningModule, L.LightningDataModule):
        saved = checkpoint.get(part.CHECKPOINT_HYPER_PARAMS_KEY)
        if saved is None:
            continue
        plain = to_plain(saved)
        foreign = [name for name, value in plain.items() if find_unreadable(value, name)]
        left_out += [f"{name} ({type(plain.pop(name)).__qualname__})" for name in foreign]
        checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = plain
        checkpoint.pop(part.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # it is a dictionary now
    return checkpoint, left_out


def to_plain(value: Any) -> Any:
    """The value with plain containers, paths as text, and numbers that are not NumPy's."""
    if isinstance(value, Namespace):
        return to_plain(vars(value))
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, MutableSequence):  # OmegaConf's too
        return list(map(to_plain, value))
    if type(value) is tuple:
        return tuple(map(to_plain, value))
    if isinstance(value, PurePath):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def unusable(path: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that must not be loaded, and what to do."""
    remedy = "start over under another RUN_ID"
    if path.name == "best.ckpt":
        remedy = (
            "train further with a larger trainer.max_epochs: the next best checkpoint replaces it"
        )
    return CheckpointError(f"{path} cannot be used: {why}. Restore the file, or {remedy}.")
