"""What a person watches while a run trains: a live bar on a terminal, plain lines elsewhere."""

import math
import re
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.clock import synchronized_time
from samestep.callbacks.rank_state import epoch_means
from samestep.data.loader import count_samples
from samestep.data.loaders import weights_of_ranks
from samestep.metrics import EpochMean
from samestep.ranks import compat, epoch_logs

REDRAW_S = 0.2  # seconds between two updates of the bar


class Progress(L.Callback):
    """Shows the progress of training: metrics, speed, and the time that is left.

    Rank zero writes to stdout, the other ranks nothing. On a terminal a bar is drawn, at most five
    times a second, and removed at the end; elsewhere a line is written after the first step and
    then every ``log_every_s`` seconds. These show the loss of the last batch, the means of the
    epoch so far of the model's ``EpochMean`` metrics, and what a step logs with ``prog_bar=True``,
    on rank zero; they are read from the device only to be shown.
    Every epoch also leaves one line with the latest
    metrics over all ranks: those that are logged with ``prog_bar=True``, or without any the losses
    and the monitored metric.

    Logs, once per epoch:
    - ``train/<unit>_per_second``: over all ranks, data loading included, validation excluded.

    Args:
        log_every_s: seconds between two lines where there is no terminal.
        unit: what a batch is counted in, in the plural.
    """

    def __init__(self, log_every_s: float, unit: str = "samples") -> None:
        self.log_every_s = log_every_s
        self.unit = unit
        self._start = 0.0  # of this epoch, on a clock that stands still while it validates
        self._epoch_line: list[str] = []  # of the epoch before, if it has not been shown
        self._bar: Bar | None = None
        self._train_sums: list[EpochMean] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar on a terminal and start the clocks."""
        steps, epochs = trainer.estimated_stepping_batches, trainer.max_epochs
        self._steps = math.inf if steps == -1 else steps
        self._epochs = math.inf if epochs in (None, -1) else epochs
        self._first_look: tuple[float, int] | None = None  # time and step
        self._due = -math.inf  # when to show something again
        self._start = time.perf_counter()
        self._samples = 0.0  # of this epoch, on all ranks
        self._per_own_sample = trainer.world_size / weights_of_ranks(trainer)[trainer.global_rank]
        self._train_sums = [
            sums for sums in epoch_means(pl_module).values() if sums.stage == "train"
        ]
        if trainer.is_global_zero and sys.stdout.isatty():
            # Of a narrow terminal the bar gives way first, then the end of the line.
            width = len(f"epoch {self._epochs:.0f}/{self._epochs:.0f}")
            epoch = TextColumn(
                "{task.description}", table_column=Column(no_wrap=True, min_width=width)
            )
            self._bar = Bar(
                epoch, BarColumn(bar_width=None), "{task.fields[facts]}",
                auto_refresh=False, transient=True, expand=True,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=None, facts="")
            self._bar.start()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the epoch before, start the clock of this one."""
        self._report_epoch(trainer)
        self._samples, self._start = 0.0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count the samples; now and then, show how far the run is."""
        self._samples += count_samples(batch) * self._per_own_sample
        now = time.perf_counter()
        if not trainer.is_global_zero or now < self._due:
            return
        facts = self._facts(
            trainer, self._running_metrics(trainer, outputs), self._samples / (now - self._start)
        )
        if self._bar is None:
            self._write(facts)
        else:
            epoch, _step, *rest = facts  # the length of the bar says the step
            self._bar.update(self._task, completed=trainer.global_step, total=self._steps)
            self._bar.update(self._task, description=epoch, facts="  ".join(rest))
            self._bar.refresh()
            self._due = now + REDRAW_S

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock of the training."""
        self._val_start = synchronized_time(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of the training again, as if no time had passed."""
        self._start += synchronized_time(pl_module) - self._val_start

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the speed.

        The epoch is reported later: some of its metrics are logged after this hook, and to read
        them here, on rank zero alone, could start a reduction that the other ranks do not join.
        """
        speed = self._samples / (synchronized_time(pl_module) - self._start)
        if trainer.is_global_zero:
            name = f"train/{self.unit}_per_second"
            # With rank_zero_only, sync_dist reduces nothing: it only keeps Lightning from warning.
            pl_module.log(name, speed, rank_zero_only=True, sync_dist=True)
            self._epoch_line = self._facts(trainer, [], speed)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the last epoch and give the terminal back."""
        self._report_epoch(trainer)
        self.on_exception()

    def on_exception(self, *_: Any) -> None:
        """Give the terminal back, after Ctrl-C too."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _running_metrics(self, trainer: L.Trainer, outputs: Any) -> list[str]:
        """The loss of the last batch, the means of the epoch so far, and what the step logs."""
        shown: dict[str, float] = {}
        if isinstance(outputs, dict) and "loss" in outputs:
            # Lightning divides the loss by the number of batches that are accumulated.
            shown["loss"] = float(outputs["loss"]) * trainer.accumulate_grad_batches
        for sums in self._train_sums:
            shown |= {n: sums.mean_so_far(n) for n in sums.names if n not in shown}
        for name, value in epoch_logs.logged_metrics(trainer, on_step=True)["pbar"].items():
            shown.setdefault(re.sub("^train[/_]|_step$", "", name), float(value))
        return [f"{name} {value:.4f}" for name, value in shown.items()]

    def _report_epoch(self, trainer: L.Trainer) -> None:
        """Leave a line with the metrics of the epoch before, over all ranks."""
        if not self._epoch_line:
            return
        chosen: dict[str, Any] = dict(trainer.progress_bar_metrics)
        if not chosen:
            monitored = {c.monitor for c in compat.callbacks_of(trainer, Checkpoints)}
            logged = trainer.callback_metrics.items()
            chosen = {n: v for n, v in logged if "loss" in n.lower() or n in monitored}
        # What is logged for steps and for the epoch has two names, and here the epoch counts.
        chosen = {name.removesuffix("_epoch"): chosen[name] for name in sorted(chosen)}
        names = [n for n in chosen if not (n.endswith("_step") and n[: -len("_step")] in chosen)]
        names.sort(key=lambda name: ("val" in name, "loss" not in name))
        shown = [
            f"{name.removeprefix('train/').replace('/', ' ')} {chosen[name]:.4f}" for name in names
        ]
        epoch, step, *pace = self._epoch_line
        # The bar tells the rest, and a terminal may have 80 columns.
        self._write([epoch, *shown] if self._bar else [epoch, step, *shown, *pace])
        self._epoch_line = []

    def _facts(self, trainer: L.Trainer, metrics: list[str], speed: float) -> list[str]:
        """How far the run is, ``metrics``, the speed and, if it is known, the time left."""
        now, step = time.perf_counter(), trainer.global_step
        epoch = f"epoch {trainer.current_epoch + 1}/{self._epochs:.0f}"
        facts = [epoch, f"step {step}/{self._steps:.0f}", *metrics, f"{speed:.0f} {self.unit}/s"]
        # Judged from the first look on, so that a slow first step does not count.
        first, first_step = self._first_look = self._first_look or (now, step)
        if first_step < step < self._steps < math.inf:
            left = (now - first) / (step - first_step) * (self._steps - step)
            facts.append(f"{timedelta(seconds=math.ceil(left))} left")
        return facts

    def _write(self, facts: list[str]) -> None:
        """Leave a line; rich puts it above the bar."""
        print("  ".join(facts), flush=True)
        self._due = time.perf_counter() + (REDRAW_S if self._bar else self.log_every_s)
