"""The state of the run, for those who look at it from outside."""

from pathlib import Path
from typing import Any

import lightning as L

from samestep.callbacks.best_checkpoint import BestCheckpoint
from samestep.run import state


class RunState(L.Callback):
    """Writes ``logs/state.json`` on rank zero after each epoch.

    ``samestep.run.directory`` writes the beginning of a run and its successful end, and
    ``samestep.ending`` an interruption.

    Args:
        run_dir: directory of the run.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write how far the run is, and its best value."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            facts = progress_of(trainer) | {"epoch": trainer.current_epoch + 1}
            state.record(self.run_dir, state.RUNNING, **facts)


def progress_of(trainer: L.Trainer) -> dict[str, Any]:
    """The step, and the best value so far where a metric is monitored."""
    facts: dict[str, Any] = {"step": trainer.global_step}
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    best = next((c for c in callbacks if isinstance(c, BestCheckpoint)), None)
    if best and best.score is not None:
        facts |= {"monitor": best.monitor, "best": best.score}
    return facts
