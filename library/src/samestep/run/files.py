"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

from samestep.errors import RunError
from samestep.ranks import environment

log = logging.getLogger(__name__)


class WriteError(RunError):
    """A file of the run cannot be written; the message says what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let an error of the disk within this block be one message.

    Raises:
        WriteError: naming ``path`` and, of several, the rank.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch hides an error of the file in an error of its own.
        causes = (error, error.__context__, error.__cause__)
        why = next((e.strerror for e in causes if isinstance(e, OSError)), None)
        if why is None:
            raise
        who = f"rank {rank}: " if (rank := environment.rank()) else ""
        raise WriteError(
            f"{who}{path} cannot be written: {why}; the checkpoints before it are intact. Free "
            "some space or get permission there; the same command then continues from them."
        ) from error


@contextmanager
def open_atomic(
    path: Path, *, before_rename: Callable[[], None] | None = None
) -> Iterator[IO[bytes]]:
    """Write a new version of ``path``; a crash at any moment leaves the old version or the new.

    The bytes go to a hidden file beside ``path``. They are forced to the disk, ``before_rename``
    is called, and then the file is renamed. After an exception the old version is untouched and
    the hidden file is removed.

    Raises:
        OSError: also if ``path`` is a folder or a device. Root could replace /dev/stdout by a file.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    is_stream = path.is_symlink() and path.parent == Path("/dev")  # /dev/stdout may be a file
    if is_stream or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "is not a regular file", str(path))
    partial = partial_of(path)
    try:
        with partial.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before_rename:
            before_rename()
        partial.replace(path)
        sync_directory(path.parent)
    finally:
        if path.parent.is_dir() and not partial.is_dir():
            partial.unlink(missing_ok=True)


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
        OSError: also if it is a FIFO, a socket or a device, for which a reader would wait.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(file, "rb")


def read_text(path: Path) -> str:
    """What a regular file holds, as UTF-8; otherwise an OSError or a UnicodeDecodeError."""
    with open_regular(path) as file:
        return file.read().decode()


def read_bytes(path: Path) -> bytes | None:
    """What a file holds; None if it cannot be read, such as a file that is not there."""
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError:
        return None


def link_file(source: Path, target: Path) -> None:
    """Give ``source`` the second name ``target``; copy it where the disk knows no hard links."""
    partial = partial_of(target)
    with writing(target):
        partial.unlink(missing_ok=True)
        try:
            partial.hardlink_to(source)
        except OSError:
            with source.open("rb") as old, open_atomic(target) as new:
                shutil.copyfileobj(old, new, 2**20)
            return
        partial.replace(target)
        # If both names already belong to the same file, the rename above does nothing.
        partial.unlink(missing_ok=True)
        sync_directory(target.parent)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(directory: Path) -> None:
    """Force the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def quarantine(path: Path, why: object) -> None:
    """Rename a damaged file or folder to ``<name>.damaged``, and warn: a new one replaces it."""
    number = 1
    aside = path.with_name(f"{path.name}.damaged")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(aside)
    log.warning("%s cannot be read (%s); it is kept as %s, and replaced", path, why, aside.name)
