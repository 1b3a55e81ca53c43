"""The callback that records a run of the matrix, and interrupts it."""

import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

FIRST_STEP = "--- the first step ---"


class Watcher(L.Callback):
    """Writes ``rank-<rank>.jsonl`` and ``weights-<rank>.pt``; prints ``FIRST_STEP``.

    ``$INTERRUPT`` is "signal epoch batch": the last rank sends the signal to itself when it begins
    this batch, once in the life of a run. The ranks of torchrun never get one at the same moment.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)
        self.has_begun = False

    def note(self, trainer: L.Trainer, **facts: Any) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        with (self.dirpath / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nothing: what it has seen is of this process."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.has_begun and trainer.is_global_zero:
            print(FIRST_STEP, flush=True)
        self.has_begun = True
        place = [trainer.current_epoch, batch_idx]
        hashes = []
        for tensor in tensors(batch):
            if tensor.ndim:  # a number is no sample
                hashes += [hash_of(row) for row in tensor.float().cpu()]
        self.note(trainer, place=place, rows=hashes)
        signum, *due = map(int, os.environ.get("INTERRUPT", "0 -1 -1").split())
        done = self.dirpath / f"done-{signum}"
        is_last_rank = trainer.global_rank == trainer.world_size - 1
        if place == due and is_last_rank and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.Signals(signum))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note(trainer, validated=metrics_of(trainer))

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note(trainer, tested=metrics_of(trainer))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        weights = {k: v for k, v in pl_module.state_dict().items() if isinstance(v, Tensor)}
        torch.save(weights, self.dirpath / f"weights-{trainer.global_rank}.pt")


def metrics_of(trainer: L.Trainer) -> dict[str, float]:
    """What the callbacks that choose and stop see, such as the best checkpoint."""
    metrics = {}
    for name, value in trainer.callback_metrics.items():
        if name.startswith(("val", "test")):
            metrics[name] = value.item()
    return metrics


def hash_of(row: Tensor) -> str:
    return hashlib.sha256(row.numpy().tobytes()).hexdigest()[:8]


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch of any kind."""
    if isinstance(batch, Tensor):
        yield batch
    elif dataclasses.is_dataclass(batch):
        yield from tensors(list(vars(batch).values()))
    elif isinstance(batch, dict):
        yield from tensors(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from tensors(part)
    elif hasattr(batch, "x"):  # a graph of PyG
        yield batch.x
