"""Checkpoints that are written atomically and verified by SHA-256.

checkpoints/
    best.ckpt               the best so far by the monitored metric
    last.ckpt               to continue from
    last-previous.ckpt      the one before it, should last.ckpt be damaged
    epoch-0002.ckpt         one to keep, with trainer.save_every_n_epochs=2
    *.ckpt.sha256           digest, run, step and role of each: see ``samestep.run.sidecar``
"""

import hashlib
import io
import logging
import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.serialization import get_crc32_options, set_crc32_options

from samestep.errors import ConfigError, RunError
from samestep.run import sidecar
from samestep.run.files import link_file, open_atomic, sha256_of, start_writeback
from samestep.run.identity import Identity, read_identity
from samestep.run.sidecar import Version

log = logging.getLogger(__name__)

# Keys without which Lightning cannot continue, or a model cannot be loaded.
TO_CONTINUE = ("state_dict", "loops", "callbacks", "global_step")
TO_LOAD = ("state_dict",)
KEPT = "epoch-*.ckpt"  # names of numbered checkpoints
HASHED_ASIDE = 2**16  # bytes that are worth the call of another thread


class CheckpointError(RunError):
    """A checkpoint cannot be written, or must not be loaded; the message says what to do."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, forces it to the disk, and renames it.

    A process that is killed at any moment leaves a valid checkpoint. ``load_checkpoint`` refuses
    files without a sidecar, files of another run or another role, and pickled code.
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
        identity = read_identity(target.parent.parent).content()
        content = {**checkpoint, "samestep": identity}
        sha256 = hashlib.sha256()

        def make_way() -> None:
            version = Version(
                sha256.hexdigest(), target.name, identity["run_id"], content.get("global_step", 0)
            )
            sidecar.write(target, version)
            if target.name == "last.ckpt" and target.exists():
                target.replace(sidecar.previous(target))

        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(target, before_rename=make_way) as file:
                _save_and_hash(content, file, sha256)
        except CheckpointError:
            raise
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
    identity = read_identity(path.parent.parent)
    version = verify(path, identity)
    if isinstance(version, str):
        raise refused(path, version)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        why = f"it is no checkpoint of ours: {str(error).splitlines()[0]}"
        raise refused(path, why) from error
    if why_not := _content_problem(checkpoint, required, identity):
        raise refused(path, why_not)
    content: dict[str, Any] = checkpoint
    return content


def verify(path: Path, identity: Identity) -> Version | str:
    """The version of the checkpoint that the file is; or, as a sentence, why it is none."""
    try:
        sha256 = sha256_of(path)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    versions = sidecar.read(path)
    if not versions:
        name = sidecar.path_of(path).name
        return f"there is no {name} beside it, which proves that it is whole"
    found = [version for version in versions if version.sha256 == sha256]
    if not found:
        name = sidecar.path_of(path).name
        return f"it is damaged, or from elsewhere: its SHA-256 is not in {name}"
    if found[0].file != sidecar.role_of(path):
        return f"it was saved as {found[0].file}, and must not take the place of another"
    return identity.problem_with({"run_id": found[0].run_id}) or found[0]


def find_newest(directory: Path, identity: Identity | None = None) -> Path | None:
    """The newest valid checkpoint, as ``find_valid`` finds it: its path alone."""
    found = find_valid(directory, identity)
    return found[0] if found else None


def find_valid(directory: Path, identity: Identity | None = None) -> tuple[Path, Version] | None:
    """The newest valid checkpoint of a run, with a warning about those that were skipped.

    Without an identity it is the one that the starts of the run have recorded.

    Returns:
        Its path and what its sidecar says of it; None if there are no checkpoints at all.

    Raises:
        CheckpointError: if there are some, and none is valid.
    """
    identity = identity or read_identity(directory.parent)
    # Of several checkpoints of one step, the first in this order is taken.
    names = ("last.ckpt", "last-previous.ckpt", "best.ckpt")
    paths = [path for path in sorted(directory.glob("*.ckpt")) if path.name[0] != "."]
    kept = [path for path in paths if path.match(KEPT)]
    paths = [path for path in paths if path not in kept]
    paths.sort(key=lambda path: names.index(path.name) if path.name in names else len(names))
    found = {path: verify(path, identity) for path in paths}
    for path in reversed(kept):
        # There may be many of them. They are hashed only if they could be the newest.
        if _newest_step(sidecar.read(path), 0) > _newest_step(found.values(), -1):
            found[path] = verify(path, identity)
    skipped = "".join(f"\n  {path}: {why}" for path, why in found.items() if isinstance(why, str))
    valid = {path: version for path, version in found.items() if isinstance(version, Version)}
    if found and not valid:
        raise CheckpointError(
            f"no checkpoint of this run can be used:{skipped}\n"
            "Restore one together with its .sha256 file, or begin anew under another RUN_ID."
        )
    if skipped:
        log.warning("Skipped damaged checkpoints:%s", skipped)
    return max(valid.items(), key=lambda item: item[1].global_step, default=None)


def link_checkpoint(source: Path, target: Path, version: Version) -> None:
    """Give the checkpoint ``source`` a second name, such as best.ckpt, with a sidecar of its own.

    Raises:
        CheckpointError: if the disk is full or refuses.
    """
    try:
        sidecar.write(target, version._replace(file=target.name))
        link_file(source, target)
    except OSError as error:
        raise cannot_write(target, error) from error


class _Hashed:
    """A file that is written and hashed in one pass; torch needs no more of it."""

    def __init__(self, file: IO[bytes], sha256: Any, hasher: ThreadPoolExecutor) -> None:
        self.file = file
        self.sha256 = sha256
        self.hasher = hasher
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        """Write and hash at the same time; neither needs Python's lock for large data.

        Hashing takes twice as long as writing. Meanwhile the disk gets what was written.
        """
        if len(data) < HASHED_ASIDE:
            self.sha256.update(data)
            return self.file.write(data)
        hashing = self.hasher.submit(self.sha256.update, data)
        try:
            num_written = self.file.write(data)
            start_writeback(self.file, len(data))
            return num_written
        finally:
            # The memory of the data is only valid during this call.
            hashing.result()


def _save_and_hash(content: dict[str, Any], file: IO[bytes], sha256: Any) -> None:
    """Write ``content`` as ``torch.load`` reads it, and hash what is written."""
    # CRC-32 takes as long as the writing, and SHA-256 proves more. torch.load does not read it.
    has_crc32 = get_crc32_options()
    set_crc32_options(False)
    try:
        with ThreadPoolExecutor(max_workers=1) as hasher:
            torch.save(content, _Hashed(file, sha256, hasher))  # type: ignore[arg-type]
    finally:
        set_crc32_options(has_crc32)


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


def _newest_step(versions: Iterable[Version | str], default: int) -> int:
    steps = [version.global_step for version in versions if isinstance(version, Version)]
    return max(steps, default=default)


def _content_problem(checkpoint: Any, required: tuple[str, ...], identity: Identity) -> str | None:
    if not isinstance(checkpoint, dict):
        return f"it is no checkpoint of ours: it holds a {type(checkpoint).__name__}"
    missing = [key for key in required if key not in checkpoint]
    if missing:
        return f"it is no checkpoint of ours: it holds no {', '.join(missing)}"
    content = checkpoint.get("samestep") or {}
    return identity.problem_with(content)


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
    return CheckpointError(
        f"{path} is refused: {why}. Restore the file together with its .sha256 file, or {remedy}."
    )


def cannot_write(target: Path, error: Exception) -> CheckpointError:
    """The error for a file of a run that cannot be written, and what to do."""
    # torch hides an error of the file in an error of its own.
    causes = (error, error.__context__, error.__cause__)
    why = next((e.strerror for e in causes if isinstance(e, OSError)), str(error))
    return CheckpointError(
        f"{target} cannot be written: {why}; the checkpoints before it are intact. Make room or "
        "get permission there; the same command then continues from them."
    )
