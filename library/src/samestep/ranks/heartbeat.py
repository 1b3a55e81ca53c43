"""How a rank shows torchrun's agent that it makes progress, and how the agent ends a hung rank.

The agent gives its ranks a folder. Each rank has a file there, named after its process id, with two
numbers: when the rank last made progress, and within how many seconds it will make progress again.
The agent only reads them, so it also notices a process that is stopped (SIGSTOP), whose own
watchdog does not run.
"""

import math
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.option_names import option
from samestep.ranks import environment
from samestep.ranks.failure import PREFIX

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FOLDER = "SAMESTEP_HEARTBEATS"  # the variable with the name of the folder
NUMBERS = struct.Struct("dd")  # a time of the machine's monotonic clock, and seconds
MARGIN_S = 10  # seconds in which the rank's own watchdog can end it, and write down its stacks


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
        path.write_bytes(NUMBERS.pack(0, math.inf))
        with path.open("r+b") as file:
            # Writing into memory cannot fail, not even on a full disk.
            self._numbers = mmap.mmap(file.fileno(), NUMBERS.size)

    def beat(self, limit_s: float) -> None:
        """Report progress now, and again within ``limit_s``; infinity if that is not known."""
        if self._numbers is not None:
            NUMBERS.pack_into(self._numbers, 0, time.monotonic(), limit_s)


class HungRanks:
    """Reads the heartbeats of a node's ranks, and ends the ranks that make no progress.

    The watchdog of a rank ends it first. So the agent waits ``MARGIN_S`` longer.
    """

    def __init__(self, heartbeats: Path) -> None:
        self.heartbeats = heartbeats
        self.reasons: dict[int, str] = {}  # by process id, of the ranks that made no progress

    def end(self, worker_group: "WorkerGroup") -> None:
        """Kill each rank whose own watchdog should have ended it."""
        ranks = {int(worker.id): worker.global_rank for worker in worker_group.workers}
        for path in self.heartbeats.iterdir():
            # Of an earlier attempt: a new process may get the same number.
            if int(path.name) not in ranks:
                path.unlink()
        for pid, rank in ranks.items():
            # Killing takes a moment, in which the agent looks again.
            if pid in self.reasons:
                continue
            if self._is_late(pid, rank, MARGIN_S):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def explain(self, failures: "Mapping[int, ProcessFailure]") -> None:
        """Give ranks that made no progress the message that they could not leave themselves."""
        for rank, failure in failures.items():
            # It has left a message.
            if isinstance(failure.error_file_data.get("message"), dict):
                continue
            # Here a rank may also have been ended by its own watchdog, so there is no margin.
            if failure.pid in self.reasons or self._is_late(failure.pid, rank):
                extra = {"time_ns": time.time_ns()}
                message = {"message": self.reasons[failure.pid], "extraInfo": extra}
                failure.error_file_data = {"message": message}

    def _is_late(self, pid: int, rank: int, margin_s: float = 0) -> bool:
        """Whether a rank made no progress for longer than its limit; if so, print it once."""
        try:
            last, limit_s = NUMBERS.unpack((self.heartbeats / str(pid)).read_bytes())
        except (OSError, struct.error):  # no file yet, or an empty one
            return False
        age = time.monotonic() - last
        if age <= limit_s + margin_s:
            return False
        self.reasons[pid] = (
            f"{PREFIX}no progress for {age:.0f} s ({option('timeout_s')}={limit_s:g}); "
            "the files logs/rank-*.log of the run show where its ranks were"
        )
        print(f"rank {rank}: {self.reasons[pid]}", file=sys.stderr, flush=True)
        return True
