"""Ends a process whose step never ends."""

import faulthandler
import math
import time
from pathlib import Path
from typing import Any, TextIO

import lightning as L

from samestep.ranks import environment
from samestep.ranks.heartbeat import Heartbeat

RESTART_S = 1.0  # at least, between two restarts of the countdown


class Watchdog(L.Callback):
    """Ends a process whose step takes longer than ``timeout_s``, and writes down where it hangs.

    The stacks of all threads go to ``logs/rank-<n>.log``. The other ranks wait for this one, so
    each of them does the same. A process that is stopped cannot end itself: the agent ends it,
    when it gets no heartbeat.

    Args:
        timeout_s: seconds that a step, a validation batch, a test batch or a save may take.
        run_dir: directory of the run.
    """

    def __init__(self, timeout_s: float, run_dir: str) -> None:
        self.timeout_s = timeout_s
        self.path = Path(run_dir, "logs", f"rank-{environment.rank()}.log")
        self._file: TextIO | None = None
        self._heartbeat: Heartbeat | None = None
        self._started_at = -math.inf

    def on_train_start(self, *args: Any, **named: Any) -> None:
        """Start the countdown, or restart it."""
        # Each countdown is a thread, which is too slow for every step.
        now = time.monotonic()
        if now - self._started_at < RESTART_S:
            return
        # It must stay open: after a hang, faulthandler can only write to a file descriptor.
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
        if self._heartbeat is None:
            self._heartbeat = Heartbeat()
        # Before the countdown, so that the agent knows that it is over when it has ended this rank.
        self._heartbeat.beat(self.timeout_s)
        faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self._file)
        self._started_at = now

    # Whatever may hang between two of these hooks is covered by the countdown of the first.
    on_train_batch_start = on_train_batch_end = on_save_checkpoint = on_train_start
    on_validation_batch_start = on_test_batch_start = on_train_start

    def go_on(self) -> None:
        """Restart the countdown, if it runs."""
        if self._file is not None:
            self.on_train_start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop the countdown."""
        self.stop()

    def stop(self) -> None:
        """Stop the countdown: a program that survives the error of a run must not be ended."""
        faulthandler.cancel_dump_traceback_later()
        # Without a limit, so that the agent expects no more beats.
        if self._heartbeat:
            self._heartbeat.beat(math.inf)
        self._started_at = -math.inf
        if self._file:
            self._file.close()
            self._file = None
