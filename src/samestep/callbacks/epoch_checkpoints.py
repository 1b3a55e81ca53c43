"""Numbered checkpoints to keep: the ``last.ckpt`` of every n-th epoch, under a second name."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from samestep.run.checkpoint import link_checkpoint


class EpochCheckpoints(Checkpoint):
    """Keeps the checkpoint of every ``every_n_epochs``-th epoch, such as ``epoch-0002.ckpt``.

    Epochs are counted from 1. ``LastCheckpoint`` calls it at the end of each epoch, as it calls
    ``BestCheckpoint``: ``update`` before it saves ``last.ckpt``, and ``link`` after. The new file
    is a hard link to ``last.ckpt``. A process that is killed in between links it when it continues.

    Args:
        dirpath: directory of the checkpoints.
        every_n_epochs: epochs between two checkpoints that are kept; None keeps none.
    """

    def __init__(self, dirpath: str, every_n_epochs: int | None) -> None:
        self.folder = Path(dirpath)
        self.every_n_epochs = every_n_epochs
        self.epoch = 0
        """The epoch of the newest of these checkpoints; 0: there is none."""
        self.step = 0
        """Its optimizer step."""

    def update(self, trainer: L.Trainer) -> None:
        """Note whether the checkpoint of the epoch that has ended is one to keep."""
        epoch = trainer.current_epoch + 1
        if self.every_n_epochs and epoch % self.every_n_epochs == 0:
            self.epoch, self.step = epoch, trainer.global_step

    def link(self, trainer: L.Trainer, last: Path) -> list[Path]:
        """Keep ``last``, which was just saved, if its epoch is one to keep."""
        if not trainer.is_global_zero or self.epoch != trainer.current_epoch + 1:
            return []
        link_checkpoint(last, self.path_of(self.epoch))
        return [self.path_of(self.epoch)]

    def path_of(self, epoch: int) -> Path:
        """Where the checkpoint of an epoch is kept."""
        return self.folder / f"epoch-{epoch:04}.ckpt"

    def state_dict(self) -> dict[str, Any]:
        """Epoch and step of the newest checkpoint that is kept."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.epoch, self.step = state_dict["epoch"], state_dict["step"]

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Link the checkpoint from which the run continues, if that was due and was not done."""
        state = checkpoint["callbacks"].get(self.state_key)
        begins_to_fit = trainer.state.fn == "fit" and trainer.is_global_zero
        if not begins_to_fit or not state or checkpoint["global_step"] != state["step"]:
            return
        source, target = Path(str(trainer.ckpt_path)), self.path_of(state["epoch"])
        if not target.exists():
            link_checkpoint(source, target)
