"""Signals that ask to save, SIGUSR1 and SIGUSR2: the agent passes them on to its ranks."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from samestep.ranks.failure import ASKS

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerGroup


class Requests:
    """The signals that have come and were not passed on yet.

    Only a rank that trains has a handler; before, they would end it. So they wait until a rank has
    left a heartbeat. All ranks agree on what one of them was asked for.

    Args:
        heartbeats: the folder with a file for each rank that trains, see ``HungRanks``.
    """

    def __init__(self, heartbeats: Path) -> None:
        self.heartbeats = heartbeats
        self._arrived: set[int] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note these signals within the block; only the main thread can have handlers."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {signum: signal.signal(signum, self._note) for signum in ASKS}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def has_training_rank(self) -> bool:
        """Whether a rank has left a heartbeat: it has begun to train, and handles signals."""
        return any(self.heartbeats.iterdir())

    def pass_on(self, worker_group: "WorkerGroup") -> None:
        """Send what has come to the ranks that train; torchrun's agent calls this several times."""
        if not self._arrived:
            return
        ranks = [int(worker.id) for worker in worker_group.workers]
        training = [pid for pid in ranks if (self.heartbeats / str(pid)).exists()]
        if not training:
            return
        arrived, self._arrived = self._arrived, set()
        for pid in training:
            for signum in arrived:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._arrived.add(signum)
