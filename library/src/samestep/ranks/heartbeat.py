"""How a rank shows torchrun's agent that it makes progress.

The agent names a folder to its ranks. Each rank has a file there, named after its process id, with
two numbers: when the rank last made progress, and within how many seconds it will make progress
again. The agent only reads them, so it also notices a rank whose process is stopped.
"""

import math
import mmap
import os
import struct
import time
from pathlib import Path

from samestep.ranks import environment

FOLDER = "SAMESTEP_HEARTBEATS"  # the variable with the name of the folder
NUMBERS = struct.Struct("dd")  # a time of the machine's monotonic clock, and seconds


class Heartbeat:
    """What this rank says about its progress; it says nothing without an agent that asks for it."""

    def __init__(self) -> None:
        folder = environment.variable(FOLDER)
        self._numbers: mmap.mmap | None = None
        if folder is None or not Path(folder).is_dir():
            return
        path = Path(folder, str(os.getpid()))
        path.write_bytes(NUMBERS.pack(0, math.inf))
        with path.open("r+b") as file:
            # Writing into memory cannot fail, not even on a full disk.
            self._numbers = mmap.mmap(file.fileno(), NUMBERS.size)

    def beat(self, limit_s: float) -> None:
        """Say that there was progress now, and that there will be again within ``limit_s``."""
        if self._numbers is not None:
            NUMBERS.pack_into(self._numbers, 0, time.monotonic(), limit_s)

    def pause(self) -> None:
        """Say that nobody knows when there will be progress again."""
        self.beat(math.inf)


def read(folder: Path, pid: int) -> tuple[float, float]:
    """What a rank has said last.

    Returns:
        How many seconds ago it made progress, and within how many seconds it wanted to make it
        again: infinity before its first heartbeat.
    """
    try:
        last, limit_s = NUMBERS.unpack((folder / str(pid)).read_bytes())
    except (OSError, struct.error):  # no file yet, or an empty one
        return 0, math.inf
    return time.monotonic() - last, limit_s
