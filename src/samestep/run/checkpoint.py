"""Checkpoint files that are whole, proven, and there at every instant.

checkpoints/
    best.ckpt               by validation accuracy
    last.ckpt               to continue from
    last-previous.ckpt      the one before it, should last.ckpt be damaged
    manifest.json           the SHA-256 of each file, noted before the file takes its name
"""

import hashlib
import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from samestep.errors import RunError
from samestep.run.records import write_text

log = logging.getLogger(__name__)

PER_NAME = 3  # digests kept for each name: of the file, its predecessor, and one being written


class CheckpointError(RunError):
    """A checkpoint cannot be written, or must not be loaded; the message says what to do."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target, forces it to the disk, and renames it.

    A process killed at any moment leaves a valid checkpoint. ``load_checkpoint`` refuses files
    whose SHA-256 is not in the manifest, and pickled code.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write ``checkpoint`` to ``path``. Lightning calls this on rank zero.

        Raises:
            CheckpointError: if the disk is full or refuses; the older checkpoints are intact.
        """
        target = Path(path)
        partial = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                hashed = _Hashed(file)
                torch.save(checkpoint, hashed)  # type: ignore[arg-type]  # needs no more than write
                file.flush()
                os.fsync(file.fileno())
            _note(target, hashed.sha256.hexdigest(), checkpoint.get("global_step", 0))
            if target.name == "last.ckpt" and target.exists():
                target.replace(previous(target))
            partial.replace(target)
            _sync(target.parent)
        except (OSError, RuntimeError) as error:  # torch hides an error of the file in its own
            causes = (error, error.__context__, error.__cause__)
            why = next((e.strerror for e in causes if isinstance(e, OSError)), str(error))
            raise CheckpointError(
                f"{target} cannot be written: {why}; the checkpoints before it are intact. Make "
                "room or get permission there; the same command then continues from them."
            ) from error
        finally:
            if target.parent.exists():
                partial.unlink(missing_ok=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read what ``save_checkpoint`` wrote, tensors and numbers only.

        Raises:
            CheckpointError: if the file is damaged or foreign.
        """
        return load(Path(path))


def load(path: Path) -> dict[str, Any]:
    """The checkpoint at ``path``, on the CPU, once its digest is proven; else CheckpointError."""
    if why := damage(_digest(path), _manifest(path.parent)):
        raise CheckpointError(f"{path} is refused: {why}")
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is refused: it is no checkpoint of ours: {why}") from error
    return checkpoint


def previous(path: Path) -> Path:
    """Where the predecessor of a checkpoint is kept."""
    return path.with_stem(f"{path.stem}-previous")


def damage(sha256: str, manifest: list[dict[str, Any]]) -> str | None:
    """What is wrong with the checkpoint of this digest; None if it is as it was written."""
    if not manifest:
        return "there is no manifest.json beside it, which proves that it is whole"
    if sha256 not in {entry["sha256"] for entry in manifest}:
        return "it is damaged, or from elsewhere: its SHA-256 is not in manifest.json"
    return None


def newest(directory: Path) -> Path | None:
    """The newest valid checkpoint, saying which were skipped; None if there are none at all.

    Raises:
        CheckpointError: if there are some, and none is valid.
    """
    manifest = _manifest(directory)
    order = {entry["sha256"]: place for place, entry in enumerate(manifest)}
    digests = {path: _digest(path) for path in sorted(directory.glob("*.ckpt"))}
    found = {path: damage(digest, manifest) for path, digest in digests.items()}
    skipped = "".join(f"\n  {path}: {why}" for path, why in found.items() if why)
    valid = [path for path, why in found.items() if why is None]
    if found and not valid:
        raise CheckpointError(
            f"no checkpoint of this run can be used:{skipped}\n"
            "Restore one together with its manifest.json, or begin anew under another RUN_ID."
        )
    if skipped:
        log.warning("Skipped damaged checkpoints:%s", skipped)
    return max(valid, key=lambda path: order[digests[path]], default=None)


class _Hashed:
    """A file that is written and hashed in one pass."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(directory: Path) -> list[dict[str, Any]]:
    """The entries, oldest first; none if the file is absent or damaged."""
    try:
        entries: list[dict[str, Any]] = json.loads((directory / "manifest.json").read_text())
    except (OSError, ValueError):
        return []
    return entries


def _note(target: Path, sha256: str, global_step: int) -> None:
    """Add a digest to the manifest, before its file takes the name; so renames need no note."""
    entries = _manifest(target.parent)
    own = [entry for entry in entries if entry["name"] == target.name]
    for entry in own[: len(own) + 1 - PER_NAME]:
        entries.remove(entry)
    entries.append({"name": target.name, "sha256": sha256, "global_step": global_step})
    write_text(target.parent / "manifest.json", manifest_text(entries))


def manifest_text(entries: list[dict[str, Any]]) -> str:
    """A manifest as it is written: JSON, one entry per line."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    return f"[\n{lines}\n]\n"


def _sync(directory: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
