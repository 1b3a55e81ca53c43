"""The manifest of a checkpoint: the end of its file, which identifies it and proves it intact.

A checkpoint is a zip file, as torch writes it, and the comment of this zip file is its manifest:
the run, the configuration and the step of the checkpoint as JSON, followed by the SHA-256 of every
byte before. ``unzip -z last.ckpt`` shows it. Reading it needs the last bytes of the file, no torch.
"""

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from samestep.run.files import open_regular
from samestep.run.record import Record

PATTERN = re.compile(rb'(\{"run_id": .*\}) ([0-9a-f]{64})\Z')
HASH_CHARS = 64  # a SHA-256 in hexadecimal
TAIL_BYTES = 4096  # a manifest is shorter
BLOCK_BYTES = 2**23


class Manifest(NamedTuple):
    """What a checkpoint states about itself."""

    run_id: str | None
    config: str | None  # digest of the configuration with which it was saved
    global_step: int
    best_step: int | None  # of the best checkpoint, when this one was saved
    saved: str  # the time in UTC, which distinguishes two saves of one step
    sha256: str = ""
    shards: str | None = None  # the folder with the parts of the ranks; see plugins/shards.py
    # saved by the run between two steps, and not by a callback or script at any moment
    is_of_run: bool = True

    @property
    def age(self) -> tuple[int, str]:
        """Orders the checkpoints of a run: a newer one has a greater value."""
        return self.global_step, self.saved

    def files(self) -> list[str]:
        """The shards, one for each rank, relative to the folder of the checkpoint."""
        if not self.shards:
            return []
        # shards-<step>-<number of ranks>-<token>
        num_ranks = int(self.shards.split("-")[2])
        return [f"{self.shards}/{rank}.shard" for rank in range(num_ranks)]


class HashedFile:
    """An empty file to which ``torch.save`` writes a zip file, front to back, hashed on the way.

    The kernel starts to write each block to the disk as soon as it is hashed, and drops it from
    memory.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._sha256 = hashlib.sha256()
        # The last two bytes of a zip file are the length of its comment, which `add` replaces. So
        # the hash always lags two bytes behind.
        self._end = b""

    def write(self, data: Any) -> None:
        """Write bytes."""
        whole = memoryview(data)
        for start in range(0, len(whole), BLOCK_BYTES):
            block = whole[start : start + BLOCK_BYTES]
            self.file.write(block)
            self._hash(block)
            # A large checkpoint would otherwise evict the data set from the page cache.
            if len(block) == BLOCK_BYTES and hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # only a hint to Linux
                    os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _hash(self, block: memoryview) -> None:
        if len(block) > 1:
            self._sha256.update(self._end)
            self._sha256.update(block[:-2])
            self._end = bytes(block[-2:])
        else:
            self._sha256.update(self._end[:-1])
            self._end = self._end[-1:] + bytes(block)

    def flush(self) -> None:
        """Do nothing: ``torch.save`` flushes before ``add`` writes the end."""

    def add(self, manifest: Manifest) -> None:
        """Put the manifest at the end of the zip file."""
        content = manifest._asdict()
        del content["sha256"]
        if manifest.shards is None:
            del content["shards"]
        if manifest.is_of_run:
            del content["is_of_run"]
        text = json.dumps(content).encode() + b" "
        end = struct.pack("<H", len(text) + HASH_CHARS) + text
        self._sha256.update(end)
        self.file.seek(-2, os.SEEK_END)
        self.file.write(end + self._sha256.hexdigest().encode())


def parse(tail: bytes) -> Manifest | None:
    """The manifest at the end of these bytes; None if there is none."""
    found = PATTERN.search(tail)
    if found is None:
        return None
    try:
        manifest = Manifest(**json.loads(found[1]), sha256=found[2].decode())
    except (ValueError, TypeError):
        return None
    # `age` compares these two, so that a forged or damaged value would raise far from here.
    has_age = isinstance(manifest.global_step, int) and isinstance(manifest.saved, str)
    return manifest if has_age else None


def read(path: Path) -> Manifest | None:
    """The manifest of a file, without hashing the rest of it; None if there is none."""
    try:
        with open_regular(path) as file:
            return _read_end(file)
    except OSError:
        return None


def verify(
    path: Path, known: Record | None = None, files: slice = slice(None), folder: Path | None = None
) -> Manifest | str:
    """The manifest of an intact checkpoint; otherwise a clause that says what is wrong.

    Args:
        path: the checkpoint.
        known: the record of a run, to which the checkpoint must belong; None: to any run.
        files: the shards to verify, of ``Manifest.files()``.
        folder: where the shards are; None: beside the checkpoint.
    """
    manifest = _verify_bytes(path)
    if isinstance(manifest, str):
        return manifest
    for name in manifest.files()[files]:
        shard = _verify_bytes((folder or path.parent) / name)
        if isinstance(shard, str):
            return f"its shard {name}: {shard}"
        if shard.shards != name:
            return f"its shard {name} is of another checkpoint"
    if known is None:
        return manifest
    return _find_mismatch(manifest, known) or manifest


def _find_mismatch(manifest: Manifest, known: Record) -> str | None:
    """Why a checkpoint is not one of the run with this record; None if it is."""
    # An old or damaged record may lack either fact. An unknown fact rejects nothing.
    if known.run_id and manifest.run_id and manifest.run_id != known.run_id:
        return (
            f"it belongs to the run {manifest.run_id}, and this run is {known.run_id}; to continue "
            f"that one, give its directory its own name again and set RUN_ID={manifest.run_id}"
        )
    if known.configs and manifest.config and manifest.config not in known.configs:
        return "it belongs to a run with another configuration"
    return None


def newest(run_dir: Path) -> Manifest | None:
    """The manifest of the newest checkpoint of a run, which says which one is the best."""
    found = read_all(find_checkpoints(run_dir / "checkpoints"))
    of_run = [own for own in found if own.is_of_run]
    return max(of_run, key=lambda own: own.age, default=None)


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, damaged ones too, in the order of their names."""
    # Names with a dot in front are of files that are being written.
    return sorted(folder.glob("[!.]*.ckpt"))


def read_all(paths: Iterable[Path]) -> list[Manifest]:
    """The manifests of those files that have one."""
    return list(filter(None, map(read, paths)))


def prune(folder: Path) -> None:
    """Remove the shards that no checkpoint in ``folder`` names.

    On rank zero only, and never while a checkpoint is written: its shards have no name there yet.
    """
    named = {own.shards for own in read_all(find_checkpoints(folder))}
    for path in folder.glob("shards-*"):
        if path.name not in named:
            shutil.rmtree(path, ignore_errors=True)


def tested_checkpoint(run_dir: Path) -> str:
    """The checkpoint that a run tests: ``best``, or ``last`` where no metric has chosen one."""
    own = newest(run_dir)
    # A best checkpoint that is lost is not replaced by other weights.
    return "last" if own and own.best_step is None else "best"


def _read_end(file: IO[bytes]) -> Manifest | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    return parse(file.read())


def _verify_bytes(path: Path) -> Manifest | str:
    """The manifest of an unmodified file; otherwise what is wrong with the file."""
    try:
        with open_regular(path) as file:
            manifest = _read_end(file)
            if manifest is None:
                return "it is damaged, or not a Samestep checkpoint: it has no manifest"
            # Everything but the hash itself, which is the end of the file.
            left = file.tell() - HASH_CHARS
            sha256 = hashlib.sha256()
            file.seek(0)
            # In blocks: a checkpoint may be larger than the memory.
            while block := file.read(min(BLOCK_BYTES, left)):
                sha256.update(block)
                left -= len(block)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if sha256.hexdigest() != manifest.sha256:
        return "it is damaged: its SHA-256 is not the one in its manifest"
    return manifest
