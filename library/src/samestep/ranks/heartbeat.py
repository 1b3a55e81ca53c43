"""How a rank shows torchrun's agent that it makes progress.

The agent gives its ranks a folder. Each rank has a file there, named after its process id, with two
numbers: when the rank last made progress, and within how many seconds it will make progress again.
Behind them is how the user types ``timeout_s``. The agent only reads them, see
``samestep.node.hung_ranks``, so it also notices a process that is stopped (SIGSTOP), whose own
watchdog does not run.
"""

import math
import mmap
import os
import struct
import time
from pathlib import Path

from samestep.option_names import option
from samestep.ranks import environment

FOLDER = "SAMESTEP_HEARTBEATS"  # the variable with the name of the folder
NUMBERS = struct.Struct("dd")  # a time of the machine's monotonic clock, and seconds


class Heartbeat:
    """The progress that this rank reports; without an agent it reports none."""

    def __init__(self) -> None:
        folder = environment.variable(FOLDER)
        self._numbers: mmap.mmap | None = None
        # The variable may have outlived the agent, in a process that a rank has started.
        if folder is None or not Path(folder).is_dir():
            return
        path = Path(folder, str(os.getpid()))
        # Until the first beat there is no limit: imports and downloads take as long as they need.
        path.write_bytes(NUMBERS.pack(0, math.inf) + option("timeout_s").encode())
        with path.open("r+b") as file:
            # Writing into memory cannot fail, not even on a full disk.
            self._numbers = mmap.mmap(file.fileno(), NUMBERS.size)

    def beat(self, limit_s: float) -> None:
        """Report progress now, and again within ``limit_s``; infinity if that is not known."""
        if self._numbers is not None:
            NUMBERS.pack_into(self._numbers, 0, time.monotonic(), limit_s)
