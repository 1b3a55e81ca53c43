"""One program of the laboratory: a cause or its twin, killed once within the second epoch.

python labs/receipts/program.py "a global variable" lost
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L

from labs.receipts.causes import parts_of
from samestep import Trainer

KILLED_AT = (1, 5)
"""Epoch and batch, from 0. The last checkpoint is of the end of the first epoch."""


class Killer(L.Callback):
    """Ends the process by SIGKILL, once in the life of a run."""

    marker = Path("killed")

    def on_save_checkpoint(self, *args: Any) -> None:
        """Nothing: it has no state."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == KILLED_AT and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def model_of(name: str, kind: str) -> L.LightningModule:
    """For a configuration of Hydra."""
    return parts_of(name, is_kept=kind == "kept")[0]


def data_of(name: str, kind: str) -> L.LightningDataModule:
    """For a configuration of Hydra."""
    return parts_of(name, is_kept=kind == "kept")[1]


def main() -> None:
    _, name, kind = sys.argv
    trainer = Trainer(
        run_dir="run", max_epochs=3, accelerator="cpu", devices=1, callbacks=[Killer()],
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    model, data = parts_of(name, is_kept=kind == "kept")
    trainer.fit(model, datamodule=data)


if __name__ == "__main__":
    main()
