"""The metrics of a run over time, as a table on the disk."""

import csv
import io
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger

from samestep.ranks import environment, lightning_patches
from samestep.run.files import WriteError, write_text, writing
from samestep.run.metrics import is_result, read_history
from samestep.run.record import Record


class History(Logger, L.Callback):
    """Everything that is logged, in ``metrics.csv``: one row per step at which something was.

    ``step`` counts optimizer steps from 0, and with manual optimization batches. Rank zero writes
    the file, whole, before each checkpoint and at the end of each stage. The rows are in the
    checkpoint too. A run that continues takes them from there, because later steps are trained
    again, and because a checkpoint is verified and the file is not. So the file of an interrupted
    run equals that of an undisturbed one.

    What a validation or test logs for each batch is left to the trackers: Lightning counts those
    batches, and the rows are optimizer steps.

    Give it to the Trainer as a callback too: Lightning logs an epoch's training metrics after it
    has saved the checkpoint, and a process that is killed in between would lose them.
    """

    name = version = ""  # of Lightning's own folders: the file has its place in the run directory
    save_dir = ""  # the run directory

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.save_dir = str(run_dir)
        self.rows: dict[int, dict[str, float]] = {}
        self._evaluates_batches = False
        self._place: dict[str, int] = {}  # of an evaluation in a process that has not trained

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave out what is logged from here on; so does the start of a test."""
        self._evaluates_batches = True

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The batches are over, and their means follow; so does the end of a test."""
        self._evaluates_batches = False

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def read(self, known: Record) -> None:
        """Take the rows of the file, in a process that has not trained.

        Lightning counts from zero there. ``known`` says after which step the run is.
        """
        if not self.rows:
            rows = read_history(Path(self.save_dir))
            self.rows = {int(row["step"]): row for row in rows}
            self._place = {"epoch": known.epoch or 0, "step": known.step or 0}

    def last(self) -> dict[str, float]:
        """The newest value of each learning metric, and the seconds of training; no speeds."""
        rows = [row for _, row in sorted(self.rows.items())]
        newest = {name: value for row in rows for name, value in row.items()}
        figures = {name: newest[name] for name in sorted(newest) if is_result(name)}
        if seconds := [row["time/epoch_s"] for row in rows if "time/epoch_s" in row]:
            times = {"time/total_s": math.fsum(seconds), "time/epoch_s": statistics.median(seconds)}
            figures |= times
        return figures

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add ``metrics`` to the row of ``step``."""
        if self._evaluates_batches:
            return
        if self._place:
            metrics, step = {**metrics, **self._place}, self._place["step"]
        row = self.rows.setdefault(step or 0, {"step": step or 0})
        row.update((name, float(value)) for name, value in metrics.items())

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the rows of the checkpoint from which a run continues."""
        if trainer.state.fn != "fit":
            return  # a test loads the best checkpoint, and changes no history
        self._place = {}
        # Not the global step: a batch may have no step of an optimizer, or two.
        loop = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]
        rows, num_steps = checkpoint["history"], loop["_batches_that_stepped"]
        self.rows = {step: dict(row) for step, row in rows.items() if step < num_steps}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the file, before the checkpoint that makes its steps final."""
        epochs = trainer.fit_loop.epoch_progress.current
        if epochs.processed > epochs.completed:  # type: ignore[attr-defined]  # an epoch's end
            metrics = trainer.callback_metrics.items()
            late = ("train/", "time/", "system/", "lr")
            figures = {name: value for name, value in metrics if name.startswith(late)}
            figures |= lightning_patches.logged_metrics(trainer, on_step=False)["log"]
            numbers = {name: value.item() for name, value in figures.items()}
            last = lightning_patches.num_logged_steps(trainer) - 1
            self.log_metrics(numbers | {"epoch": trainer.current_epoch}, last)
        checkpoint["history"] = {step: dict(row) for step, row in self.rows.items()}
        self._write()

    def finalize(self, status: str) -> None:
        """Write the file. Lightning calls this at the end of fit and test, and after an error."""
        try:
            self._write()
        except WriteError:
            if status != "failed":
                raise
            # The disk is full, and the error that is on its way already says so.

    def _write(self) -> None:
        if environment.rank() != 0:
            return
        names = {name for row in self.rows.values() for name in row} - {"epoch", "step"}
        text = io.StringIO()
        table = csv.DictWriter(text, ["epoch", "step", *sorted(names)], lineterminator="\n")
        table.writeheader()
        for _, row in sorted(self.rows.items()):
            counts = {name: int(row[name]) for name in ("epoch", "step") if name in row}
            table.writerow(row | counts)
        path = Path(self.save_dir) / "metrics.csv"
        with writing(path):
            write_text(path, text.getvalue())

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: ``config.yaml`` has them."""
