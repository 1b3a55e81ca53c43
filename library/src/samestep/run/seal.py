"""The seal of a checkpoint: the end of its file, which says what it is and proves the rest.

A checkpoint is a zip file, as torch writes it, and the comment of this zip file is its seal: the
run, the configuration and the step of the checkpoint as JSON, and then the SHA-256 of every byte
before. ``unzip -z last.ckpt`` shows it. Reading it takes the last bytes of the file and no torch.
"""

import hashlib
import json
import os
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from samestep.run.files import open_regular
from samestep.run.record import Record

SEAL = re.compile(rb'(\{"run_id": .*\}) ([0-9a-f]{64})\Z')
HASH_CHARS = 64  # a SHA-256 in hexadecimal
TAIL_BYTES = 4096  # a seal is shorter
BLOCK_BYTES = 2**20


class Seal(NamedTuple):
    """What a checkpoint says of itself."""

    run_id: str | None
    config: str | None  # digest of the configuration with which it was saved
    global_step: int
    best_step: int | None  # of the best checkpoint, when this one was saved
    saved: str  # the time in UTC, which tells two saves of one step apart
    sha256: str = ""

    @property
    def age(self) -> tuple[int, str]:
        """Of two checkpoints of a run, the newer one has the greater value."""
        return self.global_step, self.saved


def add(file: IO[bytes], seal: Seal) -> None:
    """Put a seal to a zip file without a comment that was just written to ``file``."""
    content = {name: value for name, value in seal._asdict().items() if name != "sha256"}
    text = json.dumps(content).encode() + b" "
    # The last two bytes of a zip file are the length of its comment.
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", len(text) + HASH_CHARS) + text)
    file.flush()
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            # A hint to Linux: the disk begins to write while the pages in memory are hashed.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    file.write(hashlib.file_digest(file, "sha256").hexdigest().encode())  # type: ignore[arg-type]


def parse(tail: bytes) -> Seal | None:
    """The seal at the end of these bytes; None if there is none."""
    found = SEAL.search(tail)
    try:
        seal = Seal(**json.loads(found[1]), sha256=found[2].decode()) if found else None
    except (ValueError, TypeError):
        return None
    is_one = seal and isinstance(seal.global_step, int) and isinstance(seal.saved, str)
    return seal if is_one else None


def read(path: Path) -> Seal | None:
    """The seal of a file, which is not compared with the rest; None if it has none."""
    try:
        with open_regular(path) as file:
            return _read_end(file)
    except OSError:
        return None


def verify(path: Path, known: Record | None = None) -> Seal | str:
    """The seal of an intact checkpoint; otherwise, as a sentence, what is wrong.

    With ``known``, the record of a run, it must be a checkpoint of this run.
    """
    try:
        with open_regular(path) as file:
            seal = _read_end(file)
            if seal is None:
                return "it is damaged, or no Samestep checkpoint: it has no seal"
            sha256, left = hashlib.sha256(), file.tell() - HASH_CHARS
            file.seek(0)
            while block := file.read(min(BLOCK_BYTES, left)):
                sha256.update(block)
                left -= len(block)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if sha256.hexdigest() != seal.sha256:
        return "it is damaged: its SHA-256 is not that of its seal"
    if known and known.run_id and seal.run_id and seal.run_id != known.run_id:
        return (
            f"it belongs to the run {seal.run_id}, and this run is {known.run_id}; to continue "
            f"that one, give its directory its own name again and set RUN_ID={seal.run_id}"
        )
    if known and known.configs and seal.config and seal.config not in known.configs:
        return "it belongs to a run with another configuration"
    return seal


def _read_end(file: IO[bytes]) -> Seal | None:
    file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
    return parse(file.read())
