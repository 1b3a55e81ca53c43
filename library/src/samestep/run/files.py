"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from samestep.errors import RunError, remedy_of
from samestep.ranks import environment

log = logging.getLogger(__name__)


class WriteError(RunError):
    """A file of the run cannot be written; the message says what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk error within this block into one message.

    Raises:
        WriteError: naming ``path``, and the rank if it is not zero.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = _find_disk_error(error)
        if cause is None:
            raise
        rank = environment.rank()
        place = f"rank {rank}: {path}" if rank else str(path)
        raise WriteError(
            f"{place} cannot be written: {cause.strerror}; the checkpoints before it are intact; "
            f"{remedy_of(cause)}, and the same command continues from them"
        ) from error


def _find_disk_error(error: Exception) -> OSError | None:
    # torch.save raises a RuntimeError of its own while it handles the OSError of the file.
    for cause in (error, error.__context__, error.__cause__):
        if isinstance(cause, OSError):
            return cause
    return None


@contextmanager
def open_atomic(
    path: Path, *, before_rename: Callable[[], None] | None = None
) -> Iterator[IO[bytes]]:
    """Write a new version of ``path``; a crash at any moment leaves the old version or the new.

    The bytes go to a hidden file beside ``path``, which is forced to the disk and then renamed.
    ``before_rename`` is called just before that. After an exception the old version is untouched,
    and the hidden file is removed.

    Raises:
        OSError: also if ``path`` is a folder or a device.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # A rename would succeed for root, and replace /dev/stdout of the whole machine by a file.
    is_stream = path.is_symlink() and path.parent == Path("/dev")
    if is_stream or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "is not a regular file", str(path))
    partial = partial_of(path)
    try:
        with partial.open("w+b") as file:
            yield file
            file.flush()
            # Without it, a power failure may leave the new name with an empty file.
            sync_file(file.fileno())
        if before_rename:
            before_rename()
        partial.replace(path)
        sync_directory(path.parent)
    finally:
        # The first error counts, not one of the cleanup: the run directory may have been removed.
        with suppress(OSError):
            partial.unlink()


def partial_of(path: Path) -> Path:
    """The hidden file beside ``path`` that is renamed to it when it is complete."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all: a crash at any moment leaves the old text or the new."""
    with open_atomic(path) as file:
        file.write(text.encode())


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read.

    Raises:
        OSError: also if it is a FIFO, a socket or a device, which a reader could wait for.
    """
    # Opening a FIFO would block until a process writes to it.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(file, "rb")


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        OSError: if the file cannot be read.
        UnicodeDecodeError: if it is not UTF-8.
    """
    with open_regular(path) as file:
        return file.read().decode()


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file, or no object in it."""
    try:
        content = json.loads(read_text(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_bytes(path: Path) -> bytes | None:
    """The content of a file; None if it cannot be read or does not exist."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError:
        return None


def write_if_changed(path: Path, content: bytes | None) -> None:
    """Write a file whole or not at all, unless it has this content; None writes nothing."""
    if content in (None, read_bytes(path)):
        return
    with open_atomic(path) as file:
        file.write(content)


def link_file(source: Path, target: Path) -> None:
    """Give ``source`` the second name ``target``; copy it where hard links are not supported."""
    partial = partial_of(target)
    with writing(target):
        partial.unlink(missing_ok=True)
        try:
            partial.hardlink_to(source)
        except OSError:
            with source.open("rb") as old, open_atomic(target) as new:
                shutil.copyfileobj(old, new, 2**20)
            return
        # In two steps, as a hard link cannot replace an existing file.
        partial.replace(target)
        # If both names already belong to the same file, the rename above does nothing.
        partial.unlink(missing_ok=True)
        sync_directory(target.parent)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(descriptor: int) -> None:
    """Force an open file to the disk, so that it survives a power failure."""
    # On macOS fsync ends when the disk has the data in its cache, which loses them.
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        # Not every file system can do it.
        with suppress(OSError):
            fcntl.fcntl(descriptor, full_sync)
            return
    os.fsync(descriptor)


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to the disk: fsync of a file does not include its name."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def quarantine(path: Path, why: object) -> None:
    """Rename a damaged file or folder to ``<name>.damaged``, with a warning.

    The caller then writes a new one under the old name. Nothing is deleted: the damaged file may be
    the only copy of something that matters.
    """
    number = 1
    kept = path.with_name(f"{path.name}.damaged")
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(kept)
    log.warning("%s cannot be read (%s); it is kept as %s, and replaced", path, why, kept.name)
