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
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from project import stopping
from project.config import RunError
from project.records import write_text
from project.stopping import Stopped

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


class LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt``, from which the same command continues as if nothing had happened.

    Saves at the end of each epoch, every ``every_s`` seconds within one, and when told to stop by
    SIGTERM or SIGINT; then all ranks stop together. It acts between two steps only, where the
    loader calls ``between_steps``: there Lightning's counters are those of whole steps.

    Args:
        dirpath: directory of the checkpoints.
        every_s: seconds after which an interrupted epoch has been saved.
    """

    def __init__(self, dirpath: str, every_s: float) -> None:
        self.path = Path(dirpath) / "last.ckpt"
        self.every_s = every_s
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._has_ended = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Defer signals from here on; end at once if early stopping had ended this run before."""
        stopping.defer()
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step
        trainer.should_stop = trainer.should_stop or self._has_ended
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        within = 0 < loop.batch_progress.current.ready < trainer.num_training_batches
        if loop.restarting and within and fetcher and loop._should_check_val_fx(fetcher):
            # Lightning counts the step before a validation within the epoch again.
            loop._batches_that_stepped -= 1

    def between_steps(self, trainer: L.Trainer) -> None:
        """Save or stop if any rank wishes to; every rank calls this before each step."""
        due = trainer.is_global_zero and time.monotonic() - self._saved_at > self.every_s
        wish = stopping.agreed(1 if due and trainer.training else 0)
        if wish > 1:  # no signal to stop has the number 1
            raise Stopped(wish)
        if wish:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save, after the best checkpoint and early stopping have had their turn."""
        self._save(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save when all ranks have agreed to stop; no other exception comes to all of them."""
        if not isinstance(exception, Stopped):
            return
        if trainer.training and trainer.global_step > self._saved_step:
            self._save(trainer)
        if trainer.is_global_zero:
            print(f"Stopped by {exception.name} after step {trainer.global_step}; saved.")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep whether early stopping has ended the run, which Lightning forgets."""
        checkpoint["has_ended"] = trainer.should_stop

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember it; and the best score, which Lightning forgets if the run directory moved."""
        self._has_ended = checkpoint["has_ended"]
        new = str(self.path.parent.resolve())
        for state in checkpoint["callbacks"].values():
            if old := state.get("dirpath"):
                paths = {k: v.replace(old, new) for k, v in state.items() if isinstance(v, str)}
                best = {k.replace(old, new): v for k, v in state["best_k_models"].items()}
                state.update(paths, best_k_models=best)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        trainer.save_checkpoint(self.path)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step


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
