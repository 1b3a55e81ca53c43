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

from samestep.ranks import environment, epoch_logs
from samestep.run.files import WriteError, write_text, writing
from samestep.run.metrics import is_result, read_history
from samestep.run.record import Record


class History(Logger, L.Callback):
    """Writes all logged values to ``metrics.csv``: one row for each step with values.

    ``step`` counts optimizer steps from 0; with manual optimization it counts batches. Rank zero
    rewrites the file before each checkpoint and at the end of each stage. Checkpoints contain the
    rows too, and a resumed run takes them from there, so the file of an interrupted run equals that
    of an undisturbed one.

    Values that a validation or test logs per batch are not recorded: Lightning numbers them by
    batches, the rows by optimizer steps. Loggers such as TensorBoard get them.

    Pass it to the Trainer both as a logger and as a callback: the rows are part of each checkpoint.
    """

    # Lightning's loggers write to save_dir/name/version; this one writes to the run directory.
    name = version = ""
    save_dir = ""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__()
        self.save_dir = str(run_dir)
        self.rows: dict[int, dict[str, float]] = {}
        self._evaluates_batches = False
        # The row of an evaluation in a process that has not trained.
        self._place: dict[str, int] = {}

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ignore what is logged from here on. The start of a test does the same."""
        self._evaluates_batches = True

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record again: after the batches, their means are logged. So does the end of a test."""
        self._evaluates_batches = False

    on_test_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_validation_epoch_end

    def read(self, known: Record) -> None:
        """Take the rows from the file, in a process that has not trained.

        Lightning counts from zero there, so ``known`` gives the epoch and step of the run.
        """
        if not self.rows:
            rows = read_history(Path(self.save_dir))
            self.rows = {int(row["step"]): row for row in rows}
            self._place = {"epoch": known.epoch or 0, "step": known.step or 0}

    def last(self) -> dict[str, float]:
        """The newest value of each metric about learning, and the time of training; no speeds.

        A metric that is logged per step, and once more as the mean of the epoch, has the mean.
        """
        newest: dict[str, float] = {}
        seconds: list[float] = []
        for step in sorted(self.rows):
            row = self.rows[step]
            newest.update(row)
            if "time/epoch_s" in row:
                seconds.append(row["time/epoch_s"])
        # The last batch of an epoch says little beside the mean of the validation.
        for name in list(newest):
            if f"{name}_epoch" in newest:
                newest[name] = newest.pop(f"{name}_epoch")
        metrics = {name: newest[name] for name in sorted(newest) if is_result(name)}
        if seconds:
            # From the rows, not from a clock: they survive interruptions. fsum is exact, so the
            # result does not depend on the order of additions.
            metrics["time/total_s"] = math.fsum(seconds)
            metrics["time/epoch_s"] = statistics.median(seconds)
        return metrics

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add ``metrics`` to the row of ``step``."""
        if self._evaluates_batches:
            return
        if self._place:
            step = self._place["step"]
            metrics = {**metrics, **self._place}
        step = step or 0
        row = self.rows.setdefault(step, {"step": step})
        for name, value in metrics.items():
            row[name] = float(value)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the rows from the checkpoint when the run resumes.

        Not from the file: it may have rows of steps that are trained again, and is not verified.
        """
        if trainer.state.fn != "fit":
            return  # a test loads the best checkpoint, which must not shorten the history
        self._place = {}
        # Not the global step: with manual optimization a batch may have no optimizer step, or two.
        num_steps = epoch_logs.num_logged_steps_of(checkpoint)
        self.rows = {}
        for step, row in checkpoint["history"].items():
            if step < num_steps:
                self.rows[step] = dict(row)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the file before the checkpoint, after which its steps are never trained again."""
        checkpoint["history"] = {step: dict(row) for step, row in self.rows.items()}
        self._write()

    def finalize(self, status: str) -> None:
        """Write the file. Lightning calls this at the end of fit and test, and after an error."""
        # A Trainer that has only evaluated a module has no run.
        if not Path(self.save_dir).exists():
            return
        try:
            self._write()
        except WriteError:
            # If the run fails because the disk is full, that error is already being raised.
            if status != "failed":
                raise

    def _write(self) -> None:
        if environment.rank() != 0:
            return
        names = set().union(*self.rows.values()) - {"epoch", "step"}
        text = io.StringIO()
        table = csv.DictWriter(text, ["epoch", "step", *sorted(names)], lineterminator="\n")
        table.writeheader()
        for step in sorted(self.rows):
            row = dict(self.rows[step])
            # All values are floats, but 3.0 is no good number of a step.
            row["step"] = int(row["step"])
            if "epoch" in row:
                row["epoch"] = int(row["epoch"])
            table.writerow(row)
        # The whole file each time, as a metric that is logged late adds a column to all rows.
        path = Path(self.save_dir) / "metrics.csv"
        with writing(path):
            write_text(path, text.getvalue())

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore hyperparameters: ``config.yaml`` has them."""
