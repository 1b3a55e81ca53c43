"""What a person watches while a run trains: a live bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from rich.progress import BarColumn
from rich.progress import Progress as Bar

from project.data import Batch

REDRAW_S = 0.2  # seconds between two looks of the bar


class Progress(L.Callback):
    """Shows where the run is, its loss, accuracy and speed, and the time it still needs.

    Rank zero writes to stdout, the other ranks nothing. On a terminal a bar is drawn, at most five
    times a second, and removed at the end; elsewhere a line is written after the first step and
    then every ``log_every_s`` seconds. Their loss and accuracy are those of the last batch and of
    the epoch so far, on rank zero, and are read from the device only to be shown. Every epoch also
    leaves one line with its metrics over all ranks.

    Logs, once per epoch:
    - ``train/images_per_second``: over all ranks, data loading included, validation excluded.

    Attributes:
        seconds: how long ``fit`` trained and validated, in this process.
        images_per_second: as logged, over all epochs this process trained.

    Args:
        log_every_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, log_every_s: float) -> None:
        self.log_every_s = log_every_s
        self.seconds = self.images_per_second = 0.0
        self._images, self._epoch_start, self._val_s = 0, 0.0, 0.0  # of this epoch
        self._all_images, self._all_train_s = 0, 0.0  # of the epochs before
        self._epoch_line: list[str] = []  # of the epoch before, if it has not been shown
        self._first_look: tuple[float, int] | None = None  # time and step
        self._bar: Bar | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Open the bar on a terminal."""
        self._rank_zero = trainer.is_global_zero
        self._due = -math.inf if self._rank_zero else math.inf  # when to show something again
        if self._rank_zero and sys.stdout.isatty():
            columns = ("{task.description}", BarColumn(bar_width=None), "{task.fields[facts]}")
            self._bar = Bar(*columns, auto_refresh=False, transient=True, expand=True)
            self._task = self._bar.add_task("starting", total=None, facts="")
            self._bar.start()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back, after Ctrl-C too."""
        self.teardown(trainer, pl_module, "")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clocks and work out how long the run is."""
        self._world_size = trainer.world_size
        steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        self._steps = steps if steps >= 0 else math.inf  # -1: no end is known
        self._epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        if self._steps < math.inf and batches < math.inf:
            self._epochs = math.ceil(steps / math.ceil(batches / trainer.accumulate_grad_batches))
        self._fit_start = self._epoch_start = time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the epoch before, start the clock of this one."""
        self._report_epoch(trainer)
        self._images, self._epoch_start, self._val_s = 0, time.perf_counter(), 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """Count the images; now and then, show where the run is."""
        self._images += len(batch.labels) * self._world_size
        if time.perf_counter() < self._due:
            return
        # Lightning divides the loss by the number of batches that are accumulated.
        figures = [f"loss {outputs['loss'].item() * trainer.accumulate_grad_batches:.4f}"]
        if (sums := getattr(pl_module, "train_sums", None)) is not None:
            figures.append(f"accuracy {sums.accuracy():.4f}")
        train_s = time.perf_counter() - self._epoch_start - self._val_s
        line = self._line(trainer, figures, self._images / train_s)
        self._show(line, trainer.global_step, self._steps)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock of the training."""
        self._val_start = _now(pl_module)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Now and then, show how far the validation, or the test, is."""
        if time.perf_counter() >= self._due:
            label = "test" if trainer.testing else "validate"
            totals = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
            done, total = batch_idx + 1, totals[dataloader_idx]
            self._show([label, f"batch {done}/{total}"], done, total)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of the training again."""
        self._val_s += _now(pl_module) - self._val_start

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock and log the speed.

        The epoch is reported later: some of its metrics are logged after this hook, and to read
        them here, on rank zero alone, could start a reduction that the other ranks do not join.
        """
        train_s = _now(pl_module) - self._epoch_start - self._val_s
        self._all_images += self._images
        self._all_train_s += train_s
        self.images_per_second = self._all_images / self._all_train_s
        if self._rank_zero:
            speed = self._images / train_s
            # With rank_zero_only, sync_dist reduces nothing: it only keeps Lightning from warning.
            pl_module.log("train/images_per_second", speed, rank_zero_only=True, sync_dist=True)
            self._epoch_line = self._line(trainer, [], speed)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Report the last epoch."""
        self._report_epoch(trainer)
        self.seconds = time.perf_counter() - self._fit_start

    def _report_epoch(self, trainer: L.Trainer) -> None:
        if not self._epoch_line:
            return
        names = {"train/loss": "loss", "train/accuracy": "accuracy"}
        if self._val_s:  # else these are older
            names |= {"val/loss": "val loss", "val/accuracy": "val accuracy"}
        metrics = trainer.callback_metrics
        figures = [f"{names[key]} {metrics[key]:.4f}" for key in names if key in metrics]
        epoch, step, *pace = self._epoch_line
        # The bar tells the rest, and a terminal may have 80 columns.
        self._write([epoch, *figures] if self._bar else [epoch, step, *figures, *pace])
        self._epoch_line = []

    def _line(self, trainer: L.Trainer, figures: list[str], speed: float) -> list[str]:
        """Where the run is, ``figures``, the speed and, where it can be known, the time left.

        The time is judged from the first look on, so that a slow first step does not count.
        """
        now, step = time.perf_counter(), trainer.global_step
        first, first_step = self._first_look = self._first_look or (now, step)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        left = [max(0.0, t.time_remaining() or 0.0) for t in callbacks if isinstance(t, Timer)]
        if first_step < step < self._steps < math.inf:
            left.append((now - first) / (step - first_step) * (self._steps - step))
        return [
            f"epoch {trainer.current_epoch + 1}/{self._epochs:.0f}",
            f"step {step}/{self._steps:.0f}",
            *figures,
            f"{speed:.0f} images/s",
            *(f"{timedelta(seconds=math.ceil(seconds))} left" for seconds in sorted(left)[:1]),
        ]

    def _show(self, facts: list[str], done: int, total: float) -> None:
        """Write a line or move the bar, whose length says what the second fact says."""
        if self._bar is None:
            self._write(facts)
            return
        text = "  ".join(facts[2:])
        self._bar.update(self._task, description=facts[0], completed=done, total=total, facts=text)
        self._bar.refresh()
        self._due = time.perf_counter() + REDRAW_S

    def _write(self, facts: list[str]) -> None:
        """Leave a line; rich puts it above the bar."""
        print("  ".join(facts), flush=True)
        self._due = time.perf_counter() + (REDRAW_S if self._bar else self.log_every_s)


def _now(pl_module: L.LightningModule) -> float:
    """Seconds on a clock, once the device has done what it was told."""
    if pl_module.device.type != "cpu":
        torch.accelerator.synchronize(pl_module.device)
    return time.perf_counter()
