"""Callbacks that say what happened in a run; nothing slow is imported here."""

import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import distributed as dist

from labs.bench.measure import say

CURVE = 20  # first losses, by which the gate compares contenders


def mean_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    """The losses of this rank as means over the ranks."""
    means = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(means)
        means /= dist.get_world_size()
    return list(means.tolist())


class Timer(L.Callback):
    """The seconds of each epoch, its memory at the start, and the first losses of the run."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.trainer: L.Trainer | None = None
        self.losses: list[torch.Tensor] = []
        self.curve: list[float] = []
        self.resident: list[int] = []  # pages

    def on_train_epoch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())
        self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        if len(self.losses) < CURVE:
            self.losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.starts.append(time.perf_counter())
        self.curve = mean_over_ranks(self.losses)
        self.trainer = trainer

    def seconds(self) -> float:
        """The median of the epochs; the first one warms up."""
        seconds = [end - start for start, end in pairwise(self.starts)]
        return median(seconds[1:] or seconds)


class FirstStep(L.Callback):
    """Says when the first optimizer step was taken, and ends the process."""

    def on_train_batch_end(self, *args: Any) -> None:
        say(value=time.time() - float(os.environ["BENCH_STARTED"]))
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
