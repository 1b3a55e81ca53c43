"""A callback that sends a signal to its own process at one step, once in the life of a run."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch


class Signaller(L.Callback):
    """Sends ``signum`` before the optimizer step ``step`` of rank ``rank``; keeps the weights.

    Args:
        dirpath: where to note that it was done, and to write ``weights-<rank>.pt`` in the end.
        step: the optimizer step; -1 for none.
        signum: the signal; 0 for none.
        rank: which rank sends it to itself.
        agent: send it to the parent instead, which is torchrun's agent.
    """

    def __init__(
        self, dirpath: str, step: int = -1, signum: int = 0, rank: int = 0, agent: bool = False
    ) -> None:
        self.dirpath = Path(dirpath)
        self.step, self.signum, self.rank, self.agent = step, signum, rank, agent

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        with (self.dirpath / f"seen-{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{trainer.current_epoch} {batch[-1].flatten().tolist()}\n")
        done = self.dirpath / f"done-{trainer.global_rank}"
        due = (trainer.global_step, trainer.global_rank) == (self.step, self.rank)
        if due and not done.exists():
            done.touch()
            os.kill(os.getppid() if self.agent else os.getpid(), self.signum)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.dirpath / f"weights-{trainer.global_rank}.pt")
