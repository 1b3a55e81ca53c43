"""Callbacks with which train.py tells the harness what happened; nothing slow is imported here."""

import os
import time
from pathlib import Path
from typing import Any

import lightning as L

from tests.bench.measure import say, started


class FirstStep(L.Callback):
    """Says when the first optimizer step was taken, and ends the process."""

    def on_train_batch_end(self, *args: Any) -> None:
        say(value=time.time() - started())
        os._exit(0)


class KilledOnce(L.Callback):
    """Kills its rank after a few steps; the next attempt says how long it took to step again."""

    def __init__(self, path: str) -> None:
        self.path = Path(path) / os.environ["BENCH_STARTED"]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self.path.exists():
            say(value=time.time() - float(self.path.read_text()))
            os._exit(0)
        if trainer.global_step == 3:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(repr(time.time()))
            os.kill(os.getpid(), 9)
