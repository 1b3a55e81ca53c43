"""The progress of a run, for people: a live bar on a terminal, plain lines elsewhere."""

import math
import re
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import lightning as L
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from samestep.callbacks.checkpoints import Checkpoints, or_infinite
from samestep.callbacks.clock import synchronized_time
from samestep.callbacks.display import ShowsProgress
from samestep.callbacks.pace import StepPace
from samestep.callbacks.rank_state import parts_of_kind
from samestep.data.loader import count_samples
from samestep.data.loaders import weights_of_slices
from samestep.metrics import EpochMean
from samestep.ranks import compat, epoch_logs, virtual

REDRAW_S = 0.2  # seconds between two updates of the bar
BAR_WIDTH = 8  # columns of the bar at least


class Progress(ShowsProgress):
    """Shows the progress of training: metrics, speed, and the time that is left.

    Only rank zero writes, to stdout. On a terminal it draws a bar, at most five times a second, and
    removes it at the end; elsewhere it writes a line after the first step and then every
    ``log_every_s`` seconds. Bar and line show the loss of the last batch, the means so far of the
    model's ``EpochMean`` metrics, and what a step logs with ``prog_bar=True``, on rank zero. They
    are read from the device only to be shown.

    Every epoch also leaves one line with the latest metrics over all ranks: what is logged with
    ``prog_bar=True``, otherwise the losses and the monitored metric.

    Logs, once per epoch:
    - ``train/<unit>_per_second``: over all ranks, data loading included, validation excluded.

    Args:
        log_every_s: seconds between two lines where there is no terminal.
        unit: what a batch is counted in, in the plural.
    """

    def __init__(self, log_every_s: float, unit: str = "samples") -> None:
        self.log_every_s = log_every_s
        self.unit = unit
        self._start = 0.0  # of this epoch, on a clock that pauses while it validates
        self._epoch_line: list[str] = []  # of the epoch before, until it is shown
        self._bar: Bar | None = None
        self._train_means: list[EpochMean] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar on a terminal and start the clocks."""
        self._steps = or_infinite(trainer.estimated_stepping_batches)
        self._epochs = or_infinite(trainer.max_epochs)
        self._pace = StepPace()
        self._due = -math.inf  # when to show something again
        self._start = time.perf_counter()
        self._samples = 0.0  # of this epoch, on all ranks
        # Estimated from this rank's samples: asking the other ranks would take time in each step.
        layout, weights = virtual.layout(), weights_of_slices(trainer)
        self._per_own_sample = layout.total / sum(weights[number] for number in layout.own)
        means = parts_of_kind(pl_module, EpochMean).values()
        self._train_means = [mean for mean in means if mean.stage == "train"]
        if trainer.is_global_zero and sys.stdout.isatty():
            self._open_bar()

    def _open_bar(self) -> None:
        epochs, steps = f"{self._epochs:.0f}", f"{self._steps:.0f}"
        width = len(f"epoch {epochs}/{epochs}  step {steps}/{steps}")
        width_left = len("0:00:00 left")
        self._bar = Bar(
            TextColumn("{task.description}", table_column=fixed_column(width)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]}", table_column=fixed_column(width_left)),
            "{task.fields[facts]}",
            # Otherwise a thread redraws it ten times a second.
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        # On a narrow terminal metrics are left out. rich would take from each column.
        self._room = self._bar.console.width - width - BAR_WIDTH - width_left - len("   ")
        self._task = self._bar.add_task("starting", total=None, left="", facts="")
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
        place, left = self._describe_place(trainer), self._time_left(trainer)
        metrics = self._running_metrics(trainer, outputs)
        speed = f"{self._samples / (now - self._start):.0f} {self.unit}/s"
        if self._bar is None:
            self._write([*place, *metrics, speed, *left])
            return
        facts = join_within([*metrics, speed], self._room)
        self._bar.update(self._task, completed=trainer.global_step, total=self._steps)
        self._bar.update(self._task, description="  ".join(place), left="".join(left), facts=facts)
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
            pace = f"{speed:.0f} {self.unit}/s"
            self._epoch_line = [*self._describe_place(trainer), pace, *self._time_left(trainer)]

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
        for mean in self._train_means:
            for name in mean.names:
                # Reading a mean waits for the device.
                if name not in shown:
                    shown[name] = mean.mean_so_far(name)
        logged = epoch_logs.logged_metrics(trainer, on_step=True)["pbar"]
        for name, value in logged.items():
            # ``train_loss`` and ``train/loss_step`` are the loss that is shown already.
            shown.setdefault(re.sub("^train[/_]|_step$", "", name), float(value))
        return [f"{name} {value:.4f}" for name, value in shown.items()]

    def _report_epoch(self, trainer: L.Trainer) -> None:
        """Leave a line with the metrics of the epoch before, over all ranks."""
        if not self._epoch_line:
            return
        epoch, step, *pace = self._epoch_line
        self._epoch_line = []
        metrics = epoch_metrics(trainer)
        # Training before validation, losses first.
        names = sorted(metrics, key=lambda name: ("val" in name, "loss" not in name))
        shown = []
        for name in names:
            words = name.removeprefix("train/").replace("/", " ")
            shown.append(f"{words} {metrics[name]:.4f}")
        if self._bar:
            # The bar shows the rest, and a terminal may have 80 columns.
            self._write([epoch, *shown])
        else:
            self._write([epoch, step, *shown, *pace])

    def _describe_place(self, trainer: L.Trainer) -> list[str]:
        """How far the run is: its epoch and its step."""
        return [
            f"epoch {trainer.current_epoch + 1}/{self._epochs:.0f}",
            f"step {trainer.global_step}/{self._steps:.0f}",
        ]

    def _time_left(self, trainer: L.Trainer) -> list[str]:
        """The time that is left; empty if it is not known."""
        # Counted from the first time that something is shown, after a slow first step.
        seconds = self._pace.seconds_left(trainer.global_step, self._steps)
        # After the last step there is nothing to say.
        return [f"{timedelta(seconds=math.ceil(seconds))} left"] if seconds else []

    def _write(self, facts: list[str]) -> None:
        """Leave a line; rich puts it above the bar."""
        print("  ".join(facts), flush=True)
        pause = REDRAW_S if self._bar else self.log_every_s
        self._due = time.perf_counter() + pause


def fixed_column(width: int) -> Column:
    """A column that a narrow terminal does not shrink."""
    return Column(no_wrap=True, min_width=width)


def join_within(texts: Iterable[str], room: int) -> str:
    """The first of these texts that fit into so many columns; a number is never cut."""
    joined = ""
    for text in texts:
        longer = f"{joined}  {text}" if joined else text
        if len(longer) > room:
            break
        joined = longer
    return joined


def epoch_metrics(trainer: L.Trainer) -> dict[str, Any]:
    """The metrics that the line of an epoch shows, in the order of their names."""
    chosen: dict[str, Any] = dict(trainer.progress_bar_metrics)
    if not chosen:
        monitored = {c.monitor for c in compat.callbacks_of(trainer, Checkpoints)}
        for name, value in trainer.callback_metrics.items():
            if "loss" in name.lower() or name in monitored:
                chosen[name] = value
    metrics = {}
    for name in sorted(chosen):
        # Of a metric that is logged per step, the mean of the epoch counts, not the last batch.
        value = trainer.callback_metrics.get(f"{name}_epoch", chosen[name])
        metrics[name.removesuffix("_epoch")] = value
    # A metric that is logged per step and per epoch has two names. The epoch counts here.
    for name in list(metrics):
        metrics.pop(f"{name}_step", None)
    return metrics
