"""Ends the ranks of this node that make no progress and cannot end themselves."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.ranks import heartbeat
from samestep.ranks.failure import PREFIX

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MARGIN_S = 10  # seconds in which the rank's own watchdog can end it, and write down its stacks


class HungRanks:
    """Reads the heartbeats of the ranks for torchrun's agent.

    The watchdog of a rank ends it when it makes no progress. A process that is stopped (SIGSTOP)
    has no watchdog that could run, so the agent ends it a moment later.
    """

    def __init__(self, heartbeats: Path) -> None:
        self.heartbeats = heartbeats
        self.reasons: dict[int, str] = {}  # by process id, of the ranks that made no progress

    def end(self, worker_group: "WorkerGroup") -> None:
        """Kill each rank whose own watchdog should have ended it."""
        ranks = {int(worker.id): worker.global_rank for worker in worker_group.workers}
        for path in self.heartbeats.iterdir():
            if int(path.name) not in ranks:
                path.unlink()  # of an earlier attempt: a new process may get the same number
        for pid, rank in ranks.items():
            age, limit_s = heartbeat.read(self.heartbeats, pid)
            if age > limit_s + MARGIN_S and pid not in self.reasons:
                self.note(pid, rank, age, limit_s)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def explain(self, failures: "Mapping[int, ProcessFailure]") -> None:
        """Give ranks that made no progress the message that they could not leave themselves."""
        for rank, failure in failures.items():
            if isinstance(failure.error_file_data.get("message"), dict):
                continue  # it has left a message
            age, limit_s = heartbeat.read(self.heartbeats, failure.pid)
            if age >= limit_s and failure.pid not in self.reasons:
                self.note(failure.pid, rank, age, limit_s)
            if reason := self.reasons.get(failure.pid):
                extra = {"time_ns": time.time_ns()}
                failure.error_file_data = {"message": {"message": reason, "extraInfo": extra}}

    def note(self, pid: int, rank: int, age: float, limit_s: float) -> None:
        """Say once that a rank made no progress."""
        self.reasons[pid] = (
            f"{PREFIX}no progress for {age:.0f} s (cluster.timeout_s={limit_s:g}); "
            "the files logs/rank-*.log of the run show where its ranks were"
        )
        print(f"rank {rank}: {self.reasons[pid]}", file=sys.stderr, flush=True)
