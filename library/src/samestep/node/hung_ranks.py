"""How the agent ends a rank that makes no progress, and says why.

It reads the file that ``samestep.ranks.heartbeat`` describes.
"""

import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.ranks.failure import PREFIX
from samestep.ranks.heartbeat import NUMBERS

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MARGIN_S = 10  # seconds in which the rank's own watchdog can end it, and write down its stacks


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
            beat = (self.heartbeats / str(pid)).read_bytes()
            last, limit_s = NUMBERS.unpack_from(beat)
        except (OSError, struct.error):  # no file yet, or an empty one
            return False
        age = time.monotonic() - last
        if age <= limit_s + margin_s:
            return False
        name = beat[NUMBERS.size :].decode()
        self.reasons[pid] = (
            f"{PREFIX}no progress for {age:.0f} s ({name}={limit_s:g}); "
            "the files logs/rank-*.log of the run show where its ranks were"
        )
        print(f"rank {rank}: {self.reasons[pid]}", file=sys.stderr, flush=True)
        return True
