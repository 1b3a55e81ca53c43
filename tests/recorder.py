"""A callback that writes down what each rank was shown, for tests of order and exactness."""

import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import lightning as L
import torch


def name_samples(batch: Any) -> list[int]:
    """A number for each sample of a batch, by what the model is given of it."""
    return [zlib.crc32(sample.cpu().numpy().tobytes()) for sample in batch[0]]


class Recorder(L.Callback):
    """Writes ``rank-<n>.json``, an entry per batch, and ``weights-<n>.pt``, the final weights.

    Args:
        dirpath: where to write.

    The process kills itself with SIGKILL before the optimizer step ``$KILL_AT``.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)
        self.lines: list[dict[str, Any]] = []

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nothing: what it keeps is of this process."""

    def _record(self, stage: str, trainer: L.Trainer, batch: Any) -> None:
        self.lines.append({"stage": stage, "step": trainer.global_step, "ids": name_samples(batch)})

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == int(os.environ.get("KILL_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        self._record("train", trainer, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.lines[-1]["loss"] = outputs["loss"].item() * trainer.accumulate_grad_batches

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self._record("val", trainer, batch)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self._record("test", trainer, batch)

    def on_fit_end(self, trainer, pl_module) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        torch.save(pl_module.state_dict(), self.dirpath / f"weights-{trainer.global_rank}.pt")

    def teardown(self, trainer, pl_module, stage: str) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        path = self.dirpath / f"rank-{trainer.global_rank}.json"
        path.write_text(json.dumps(self.lines))
