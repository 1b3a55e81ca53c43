"""Ends a process whose step never ends."""

import faulthandler
import time
from pathlib import Path
from typing import Any, TextIO

import lightning as L

from samestep.ranks import environment


class Watchdog(L.Callback):
    """Ends a process whose step takes longer than ``timeout_s``, and writes down where it hangs.

    The stacks of all threads go to ``logs/rank-<n>.log``. The other ranks wait for this one, so
    each of them does the same, and none waits for the end of the world.
    """

    def __init__(self, timeout_s: float, run_dir: str) -> None:
        self.timeout_s = timeout_s
        self.path = Path(run_dir, "logs", f"rank-{environment.rank()}.log")
        self._file: TextIO | None = None
        self._wound_at = -1.0

    def _wind(self, *args: Any) -> None:
        """Begin to count anew; at most once a second, as it starts a thread."""
        now = time.monotonic()
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
        if now - self._wound_at > 1:
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=self._file)
            self._wound_at = now

    on_train_start = on_train_batch_start = on_train_batch_end = _wind  # type: ignore[assignment]
    on_validation_batch_start = on_test_batch_start = _wind  # type: ignore[assignment]
    on_save_checkpoint = _wind  # type: ignore[assignment]

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop counting."""
        faulthandler.cancel_dump_traceback_later()
        self._wound_at = -1.0
        if self._file:
            self._file.close()
            self._file = None
