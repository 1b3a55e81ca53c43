"""A callback that sends a signal to its own process at one step, once in the life of a run."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch


class Signaller(L.Callback):
    """Sends a signal before one optimizer step, and keeps what was seen and learned.

    ``$SIGNAL_AT`` is "step signal rank target": the target is ``rank``, or ``agent`` for the parent
    of the rank, which is torchrun's agent. The signal is sent once in the life of a run.

    Args:
        dirpath: where to write ``seen-<rank>.txt``, a line per batch, and ``weights-<rank>.pt``.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        self.note(trainer, batch)
        step, signum, rank, target = os.environ.get("SIGNAL_AT", "-1 0 0 rank").split()
        done = self.dirpath / f"done-{trainer.global_rank}"
        due = (trainer.global_step, trainer.global_rank) == (int(step), int(rank))
        if due and not done.exists():
            done.touch()
            os.kill(os.getppid() if target == "agent" else os.getpid(), int(signum))

    def note(self, trainer: L.Trainer, batch: Any) -> None:
        with (self.dirpath / f"seen-{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{trainer.current_epoch} {batch[-1].flatten().tolist()}\n")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.dirpath / f"weights-{trainer.global_rank}.pt")


class Quiet(Signaller):
    """A ``Signaller`` that keeps the weights only."""

    def note(self, trainer: L.Trainer, batch: Any) -> None:
        pass


class Loser(L.Callback):
    """Deletes the best checkpoint between training and test, if ``$LOSE_BEST`` is set."""

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if "LOSE_BEST" in os.environ:
            Path(trainer.default_root_dir, "checkpoints/best.ckpt").unlink()
