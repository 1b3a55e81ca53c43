"""Checkpoints that are written atomically and prove themselves by their seal.

checkpoints/
    best.ckpt               the best so far by the monitored metric
    last.ckpt               to continue from
    last-previous.ckpt      the one before it, should last.ckpt be damaged
    epoch-0002.ckpt         one to keep, with callbacks.checkpoints.every_n_epochs=2

Only ``last.ckpt`` is ever written; best.ckpt and epoch-0002.ckpt are second names of it. So what a
file is follows from its seal and not from its name: a run continues from the newest intact file.
"""

import io
import logging
import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import IO, Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.serialization import get_crc32_options, set_crc32_options

from samestep.errors import ConfigError, RunError
from samestep.run import seal
from samestep.run.files import link_file, open_atomic
from samestep.run.identity import Identity, read_identity
from samestep.run.seal import Seal, verify

log = logging.getLogger(__name__)

# Keys without which Lightning cannot continue, or a model cannot be loaded.
TO_CONTINUE = ("state_dict", "loops", "callbacks", "global_step")
TO_LOAD = ("state_dict",)
PREVIOUS = "last-previous.ckpt"


class CheckpointError(RunError):
    """A checkpoint cannot be written, or must not be loaded; the message says what to do."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, forces it to the disk, and renames it.

    A process that is killed at any moment leaves a valid checkpoint. ``load_checkpoint`` refuses
    files without an intact seal, files of another run, and pickled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, torch.Size] = {}
        """Shapes of the model's tensors, which a checkpoint must have; empty: not checked."""
        self.trial: Trial | None = None
        """If set, a checkpoint is examined and not written."""

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write ``checkpoint`` to ``path``. Lightning calls this on rank zero.

        Raises:
            CheckpointError: if the disk is full or refuses, or if the checkpoint could not be read
                again; the older checkpoints are intact.
        """
        checkpoint, left_out = restorable(checkpoint)
        problem = find_unreadable(checkpoint)
        if self.trial:
            self.trial.was_called, self.trial.problem = True, problem
            self.trial.left_out = left_out
            return
        if problem:
            raise CheckpointError(f"{problem} The checkpoints before it are intact.")
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(target, before_rename=lambda: make_way(target)) as file:
                write(checkpoint, file, read_identity(target.parent.parent))
        except (OSError, RuntimeError) as error:
            raise cannot_write(target, error) from error

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read what ``save_checkpoint`` wrote, tensors and numbers only.

        Raises:
            CheckpointError: if the file is damaged or foreign.
            ConfigError: if it is of another model than the configuration describes.
        """
        checkpoint = load(Path(path), TO_CONTINUE)
        if why := _shape_problem(checkpoint["state_dict"], self.shapes):
            raise ConfigError(
                f"{path} cannot be continued: it is of another model: {why}. Repeat the "
                "configuration that it was trained with, or begin anew under another RUN_ID",
                on_all_ranks=True,
            )
        return checkpoint


def load(path: Path, required: tuple[str, ...] = TO_LOAD) -> dict[str, Any]:
    """Read the checkpoint at ``path`` onto the CPU, once it is verified and has these keys.

    Raises:
        CheckpointError: if it is missing, damaged, of another run or role, or no checkpoint.
    """
    found = verify(path, read_identity(path.parent.parent))
    if isinstance(found, str):
        raise refused(path, found)
    try:
        checkpoint: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = f"it is no checkpoint of ours: {str(error).splitlines()[0]}"
        raise refused(path, why) from error
    if not isinstance(checkpoint, dict):
        raise refused(path, f"it is no checkpoint of ours: it holds a {type(checkpoint).__name__}")
    if missing := [key for key in required if key not in checkpoint]:
        raise refused(path, f"it is no checkpoint of ours: it holds no {', '.join(missing)}")
    return checkpoint


def find_newest(directory: Path, identity: Identity | None = None) -> Path | None:
    """The newest valid checkpoint, as ``find_valid`` finds it: its path alone."""
    found = find_valid(directory, identity)
    return found[0] if found else None


def find_valid(directory: Path, identity: Identity | None = None) -> tuple[Path, Seal] | None:
    """The newest valid checkpoint of a run, with one warning about what is wrong with others.

    Only files that may be the newest are read to their end. Without an identity it is the one that
    the starts of the run have recorded.

    Returns:
        Its path and its seal; None if there are no checkpoints at all.

    Raises:
        CheckpointError: if there are some, and none is valid.
    """
    identity = identity or read_identity(directory.parent)
    seals = {path: seal.read(path) for path in sorted(directory.glob("[!.]*.ckpt"))}
    last, previous = directory / "last.ckpt", directory / PREVIOUS

    def newness(path: Path) -> tuple[Any, ...]:
        # A file without a seal comes first, to be named. Two names of one file: last.ckpt counts.
        own = seals[path]
        return own is None, own.age if own else (), path == last, path == previous

    wrong: dict[Path, str] = {}
    newest: tuple[Path, Seal] | None = None
    for path in sorted(seals, key=newness, reverse=True):
        found = verify(path, identity)
        if isinstance(found, Seal):
            newest = path, found
            break
        wrong[path] = found
    # Each save has another seal, and last.ckpt is always the newest, unless somebody replaced it.
    if newest and last not in wrong and (own := seals.get(last)):
        if own.age < newest[1].age:
            wrong[last] = f"it is of step {own.global_step}, and {newest[0].name} is newer"
        elif own == seals.get(previous):
            wrong[last] = f"it is a copy of {PREVIOUS}, and the checkpoint after that is lost"
    lines = "".join(f"\n  {path}: {why}" for path, why in wrong.items())
    if wrong and not newest:
        raise CheckpointError(
            f"no checkpoint of this run can be used:{lines}\n"
            "Restore one, or begin anew under another RUN_ID."
        )
    if wrong and newest:
        name, step = newest[0].name, newest[1].global_step
        log.warning("Damaged or misplaced checkpoints:%s\nUsing %s, of step %d", lines, name, step)
    return newest


def link_checkpoint(source: Path, target: Path) -> None:
    """Give the checkpoint ``source`` a second name, such as best.ckpt.

    Raises:
        CheckpointError: if the disk is full or refuses.
    """
    try:
        link_file(source, target)
    except OSError as error:
        raise cannot_write(target, error) from error


def make_way(target: Path) -> None:
    """Keep the last checkpoint as the one before, when another one is about to take its name."""
    if target.name == "last.ckpt" and target.exists():
        target.replace(target.with_name(PREVIOUS))


def write(content: dict[str, Any], file: IO[bytes], identity: Identity) -> None:
    """Write ``content`` to an empty file as ``torch.load`` reads it, with its seal."""
    # CRC-32 takes as long as the writing, and SHA-256 proves more. torch.load does not read it.
    has_crc32 = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(content, file)
    finally:
        set_crc32_options(has_crc32)
    config = identity.configs[-1] if identity.configs else None
    step, best_step = content.get("global_step", 0), content.get("best_step")
    now = datetime.now(UTC).isoformat()
    seal.add(file, Seal(identity.run_id, config, step, best_step, now))


@dataclass
class Trial:
    """What a trial has found: a checkpoint that was made like any other, and not written."""

    was_called: bool = False
    problem: str | None = None
    left_out: list[str] = field(default_factory=list)


def find_unreadable(content: dict[str, Any]) -> str | None:
    """Why a run could not continue from this checkpoint, and what to do; None if it could."""
    file = io.BytesIO()
    try:
        torch.save(_without_tensors(content), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        what = find_foreign(content, "checkpoint") or str(error).splitlines()[0]
        return (
            f"the checkpoint could not be read again: {what}. What a callback, the model or the "
            "data saves must be tensors, numbers, strings, lists and dictionaries: convert it in "
            "its state_dict or on_save_checkpoint."
        )
    return None


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
        foreign = [name for name, value in plain.items() if find_unreadable({name: value})]
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


NO_TENSOR = torch.empty(0)


def _without_tensors(value: Any) -> Any:
    """The value with empty tensors, which are quick to write."""
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        return NO_TENSOR
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(item) for key, item in value.items()}
    return type(value)(map(_without_tensors, value)) if type(value) in (list, tuple) else value


def find_foreign(value: Any, place: str) -> str | None:
    """Where ``value`` holds something that is no plain value and not of torch, as a sentence."""
    kind = type(value)
    if kind.__module__.partition(".")[0] not in ("builtins", "torch", "collections"):
        return f"{place} is a {kind.__module__}.{kind.__qualname__}"
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple, set)):
        items = list(enumerate(value))
    found = (find_foreign(key, f"a key of {place}") for key, _ in items)
    inside = (find_foreign(item, f"{place}[{key!r}]") for key, item in items)
    return next((sentence for sentence in (*found, *inside) if sentence), None)


def _shape_problem(weights: dict[str, Any], shapes: dict[str, torch.Size]) -> str | None:
    for name, shape in shapes.items():
        if name not in weights:
            return f"it holds no {name}"
        if weights[name].shape != shape:
            found = list(weights[name].shape)
            return f"{name} has the shape {found}, and not {list(shape)}"
    return None


def refused(path: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that must not be loaded, and what to do."""
    remedy = "begin anew under another RUN_ID"
    if path.name == "best.ckpt":
        remedy = (
            "train further with a larger trainer.max_epochs: the best checkpoint from there on "
            "takes its place"
        )
    return CheckpointError(f"{path} is refused: {why}. Restore the file, or {remedy}.")


def cannot_write(target: Path, error: Exception) -> CheckpointError:
    """The error for a file of a run that cannot be written, and what to do."""
    # torch hides an error of the file in an error of its own.
    causes = (error, error.__context__, error.__cause__)
    why = next((e.strerror for e in causes if isinstance(e, OSError)), str(error))
    return CheckpointError(
        f"{target} cannot be written: {why}; the checkpoints before it are intact. Make room or "
        "get permission there; the same command then continues from them."
    )
