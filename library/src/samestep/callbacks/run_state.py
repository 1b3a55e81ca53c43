"""The state of the run, for those who look at it from outside."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from samestep.callbacks.checkpoints import BestCheckpoint
from samestep.callbacks.share_out import ShareOut
from samestep.run import record


class RunState(Checkpoint):
    """Writes ``run.json`` on rank zero when training begins, and after each epoch.

    It saves no checkpoint. Lightning calls the callbacks of this class last, and only when
    ``LastCheckpoint`` has compared the epoch is its best value known.

    ``samestep.run.directory`` writes the beginning of a run and its successful end, and
    ``samestep.ending`` an interruption.

    Args:
        run_dir: directory of the run.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write from where a run continues: its process may have been killed later than that."""
        self._record(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write how far the run is, and its best value."""
        self._record(trainer, trainer.current_epoch + 1)

    def _record(self, trainer: L.Trainer, num_epochs: int) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            facts = progress_of(trainer) | {"epoch": num_epochs}
            record.try_to_update(self.run_dir, record.RUNNING, **facts)


def progress_of(trainer: L.Trainer) -> dict[str, Any]:
    """The step, the best value so far (None where there is none yet), and unequal shares."""
    facts: dict[str, Any] = {"step": trainer.global_step}
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    best = next((c for c in callbacks if isinstance(c, BestCheckpoint)), None)
    if best:
        facts |= {"monitor": best.monitor, "best": best.score, "best_epoch": best.epoch}
    share_out = next((c for c in callbacks if isinstance(c, ShareOut)), None)
    if share_out and share_out.shares:
        facts["shares"] = list(share_out.shares)
    return facts
