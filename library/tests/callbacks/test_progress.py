import contextlib
import csv
import os
import pty
import re
import threading
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from library.tests.kit import Scores
from library.tests.kit import fit as train
from samestep.callbacks.progress import Progress
from samestep.metrics import EpochMean
from samestep.ranks import environment

BATCHES = [[torch.ones(8, 1), torch.zeros(8)]] * 4


def new_progress(log_every_s: float) -> Progress:
    return Progress(log_every_s, "images")


class Clock:
    """Time passes only where the model says so."""

    now = 100.0

    def __call__(self):
        return self.now


class Model(L.LightningModule):
    """A training step takes 1 s and has the loss 0.5, a validation takes 10 s."""

    def __init__(self, clock=None):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.clock = clock or Clock()
        self.train_sums = CountedMean("train", "accuracy")

    def training_step(self, batch, batch_idx):
        self.clock.now += 1
        loss = self.net(batch[0]).mean() * 0 + 0.5
        self.train_sums.update(8, accuracy=torch.tensor(6))  # 6 of 8 are right
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_sums.means(), prog_bar=True)
        self.log("train/loss", 0.5, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 2.5
        self.log("val/accuracy", 0.25 + self.current_epoch / 100, prog_bar=True)
        self.log("val/loss", 0.125)

    def train_dataloader(self):
        return DataLoader(BATCHES, batch_size=None)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class CountedMean(EpochMean):
    num_reads = 0

    def mean_so_far(self, name):
        self.num_reads += 1
        return super().mean_so_far(name)


def new_trainer(tmp_path, progress, **flags):
    defaults = {"max_epochs": 3, "num_sanity_val_steps": 0, "logger": False}
    return L.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[progress],
        **(defaults | flags),
    )


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("progress", "clock", "pace"):
        time = SimpleNamespace(perf_counter=clock)
        monkeypatch.setattr(f"samestep.callbacks.{module}.time", time)
    return clock


def fit(tmp_path, clock, capsys, log_every_s, ckpt_path=None, **flags):
    """Lines that a run writes into a pipe."""
    trainer = new_trainer(tmp_path, new_progress(log_every_s), **flags)
    trainer.fit(Model(clock), ckpt_path=ckpt_path)
    return capsys.readouterr().out.splitlines()


def test_lines_say_where_the_run_is_and_how_long_it_takes(tmp_path, clock, capsys):
    lines = fit(tmp_path, clock, capsys, log_every_s=0, max_epochs=2)
    assert lines == [
        "epoch 1/2  step 1/8  loss 0.5000  accuracy 0.7500  8 images/s",
        "epoch 1/2  step 2/8  loss 0.5000  accuracy 0.7500  8 images/s  0:00:06 left",
        "epoch 1/2  step 3/8  loss 0.5000  accuracy 0.7500  8 images/s  0:00:05 left",
        "epoch 1/2  step 4/8  loss 0.5000  accuracy 0.7500  8 images/s  0:00:04 left",
        "epoch 1/2  step 4/8  loss 0.5000  accuracy 0.7500  val accuracy 0.2500"
        "  8 images/s  0:00:18 left",  # 3 steps and a validation took 13 s
        "epoch 2/2  step 5/8  loss 0.5000  accuracy 0.7500  8 images/s  0:00:11 left",
        "epoch 2/2  step 6/8  loss 0.5000  accuracy 0.7500  8 images/s  0:00:06 left",
        "epoch 2/2  step 7/8  loss 0.5000  accuracy 0.7500  8 images/s  0:00:03 left",
        "epoch 2/2  step 8/8  loss 0.5000  accuracy 0.7500  8 images/s",
        "epoch 2/2  step 8/8  loss 0.5000  accuracy 0.7500  val accuracy 0.2600  8 images/s",
    ]


class Ordinary(Scores):
    """Logs as Lightning's examples do, and says of nothing that it is to be shown."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * 0 + 0.5
        self.log("train_loss", loss)
        self.log("train_mae", 2.0)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log_dict({"val_loss": 0.25, "val_mae": 2.0})


def test_losses_and_the_monitored_metric_are_shown_unasked(tmp_path, capsys):
    callbacks = {"callbacks": lambda: [Progress(1e9)], "monitor": "val/score"}
    train(tmp_path, lambda: Ordinary(0.5, 0.75), **callbacks)
    *_, last, _ = capsys.readouterr().out.splitlines()
    shown = "train_loss 0.5000  val_loss 0.2500  val score 0.7500"
    assert last.startswith(f"epoch 2/2  step 8/8  {shown}  ")


def test_what_a_step_logs_to_be_shown_is_shown_at_once(tmp_path, clock, capsys):
    class Both(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("train_error", 2.0 + batch_idx, prog_bar=True)
            return loss

    flags = {"max_epochs": 1, "limit_val_batches": 0, "limit_train_batches": 2}
    new_trainer(tmp_path, new_progress(0), **flags).fit(Both(clock))
    first, _, epoch = capsys.readouterr().out.splitlines()
    assert "loss 0.5000  accuracy 0.7500  error 2.0000  8 images/s" in first
    losses = "loss 0.5000  train_loss 0.5000"  # under both names that are logged
    assert f"{losses}  accuracy 0.7500  train_error 3.0000  8 images/s" in epoch


def test_between_two_lines_nothing_is_read_from_the_device(tmp_path, clock, capsys):
    progress, model = new_progress(6.5), Model(clock)
    new_trainer(tmp_path, progress, limit_val_batches=0).fit(model)
    lines = capsys.readouterr().out.splitlines()
    # The first step, the ends of the epochs after 4, 8 and 12 s, and nothing due in between.
    assert [re.findall(r"step (\d+)", line) for line in lines] == [["1"], ["4"], ["8"], ["12"]]
    assert model.train_sums.num_reads == 1


def test_a_run_that_continues_counts_on(tmp_path, clock, capsys):
    trainer = new_trainer(tmp_path, new_progress(1e9), max_epochs=1)
    trainer.fit(Model(clock))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    capsys.readouterr()
    lines = fit(tmp_path, clock, capsys, 0, tmp_path / "last.ckpt", limit_val_batches=0)
    assert lines[0] == "epoch 2/3  step 5/12  loss 0.5000  accuracy 0.7500  8 images/s"
    assert lines[1].startswith("epoch 2/3  step 6/12")
    assert lines[1].endswith("0:00:06 left")


@pytest.mark.parametrize(
    ("flags", "line", "starts", "ends"),
    [
        # Accumulated batches are one step, and their loss is whole.
        ({"accumulate_grad_batches": 3}, 3, "epoch 1/3  step 2/6  loss 0.5000", ""),
        # The first limit counts.
        ({"max_epochs": -1, "max_steps": 6}, 1, "epoch 1/inf  step 2/6", "0:00:04 left"),
        # An epoch of unknown length.
        ({"max_epochs": 1}, 0, "epoch 1/1  step 1/inf  loss 0.5000", ""),
    ],
)
def test_steps_are_counted(tmp_path, clock, capsys, flags, line: int, starts: str, ends: str):
    class Stream(Model):
        def train_dataloader(self):
            return (batch for batch in BATCHES)

    model = Stream(clock) if line == 0 else Model(clock)
    new_trainer(tmp_path, new_progress(0), **flags, limit_val_batches=0).fit(model)
    said = capsys.readouterr().out.splitlines()[line]
    assert said.startswith(starts)
    assert said.endswith(ends)


def test_the_speed_of_all_ranks_is_logged_without_the_validation(
    tmp_path, clock, capsys, monkeypatch: pytest.MonkeyPatch
):
    logger = CSVLogger(tmp_path, name="", version="")
    flags = {"logger": logger, "log_every_n_steps": 1, "val_check_interval": 2}
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    fit(tmp_path, clock, capsys, 1e9, **flags)
    with (tmp_path / "metrics.csv").open() as file:
        speeds = [row["train/images_per_second"] for row in csv.DictReader(file)]
    assert [float(speed) for speed in speeds if speed] == [16, 16, 16]


def test_other_ranks_are_silent(tmp_path, clock, capsys):
    class SecondRank(SingleDeviceStrategy):
        is_global_zero = False

    progress = new_progress(0)
    trainer = new_trainer(tmp_path, progress, strategy=SecondRank("cpu"))
    trainer.fit(Model(clock))
    assert capsys.readouterr().out == ""
    assert "train/images_per_second" not in trainer.callback_metrics


BAR = "\u2501"
HIDE = "\x1b[?25l"  # the cursor
SHOWN_AND_ERASED = "\x1b[?25h\r\x1b[1A\x1b[2K"  # the cursor; the bar
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def terminal(monkeypatch):
    """Run a function with stdout on a terminal of 80 columns; returns what the terminal got."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    # Another test may have made it, for another stdout.
    monkeypatch.setattr("rich._console", None)

    def run(function):
        ours, theirs = pty.openpty()
        received = bytearray()

        def read():
            with contextlib.suppress(OSError):  # how Linux says that the other end was closed
                while data := os.read(ours, 65536):
                    received.extend(data)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            with open(theirs, "w") as file, contextlib.redirect_stdout(file):  # noqa: PTH123
                function()
        finally:
            reader.join()
            os.close(ours)
        return received.decode()

    return run


def test_a_terminal_gets_a_bar_and_one_line_per_epoch(tmp_path, clock, terminal):
    def run():
        new_trainer(tmp_path, new_progress(1e9), max_epochs=2).fit(Model(clock))

    shown = terminal(run)
    looks = [look.strip() for look in re.split(r"[\r\n]+", ESCAPE.sub("", shown))]
    bars = [re.sub(r" \W+( |$)", " | ", look).strip() for look in looks if BAR in look]
    epoch = "loss 0.5000  accuracy 0.7500"  # there is no room for the speed
    assert bars == [
        "starting |",
        f"epoch 1/2  step 1/8 | {epoch}",
        f"epoch 1/2  step 2/8 | 0:00:06 left {epoch}",
        f"epoch 1/2  step 3/8 | 0:00:05 left {epoch}",
        f"epoch 1/2  step 4/8 | 0:00:04 left {epoch}",
        f"epoch 1/2  step 4/8 | 0:00:04 left {epoch}",  # redrawn below the line of the epoch
        f"epoch 2/2  step 5/8 | 0:00:11 left {epoch}",
        f"epoch 2/2  step 6/8 | 0:00:06 left {epoch}",
        f"epoch 2/2  step 7/8 | 0:00:03 left {epoch}",
        f"epoch 2/2  step 8/8 | {epoch}",
        f"epoch 2/2  step 8/8 | {epoch}",
        f"epoch 2/2  step 8/8 | {epoch}",  # a last time, before it is removed
    ]
    assert [look for look in looks if look and BAR not in look] == [
        "epoch 1/2  loss 0.5000  accuracy 0.7500  val accuracy 0.2500",
        "epoch 2/2  loss 0.5000  accuracy 0.7500  val accuracy 0.2600",
    ]
    assert max(map(len, looks)) <= 80
    assert shown.count(HIDE) == 1
    assert shown.endswith(SHOWN_AND_ERASED)


def test_sixty_columns_keep_the_bar_the_step_and_the_time_left(
    tmp_path, clock, terminal, monkeypatch
):
    def run():
        monkeypatch.setenv("COLUMNS", "60")
        # Large numbers: epochs and steps of three digits.
        new_trainer(tmp_path, new_progress(1e9), max_epochs=200).fit(Model(clock))

    looks = [look.strip() for look in re.split(r"[\r\n]+", ESCAPE.sub("", terminal(run)))]
    live = [look for look in looks if " left" in look]
    assert live
    for look in live:
        assert re.match(r"epoch +\d+/200  step +\d+/800 \W+\d+:\d\d:\d\d left", look)
        assert len(look) <= 60


def test_a_narrow_terminal_keeps_the_epoch(tmp_path, clock, terminal, monkeypatch):
    def run():
        monkeypatch.setenv("COLUMNS", "40")
        new_trainer(tmp_path, new_progress(1e9), max_epochs=2).fit(Model(clock))

    looks = [look.strip() for look in re.split(r"[\r\n]+", ESCAPE.sub("", terminal(run)))]
    live = [look for look in looks if "step" in look]
    assert len(live) >= 8
    assert all(re.match(r"epoch [12]/2 ", look) for look in live)
    assert max(map(len, live)) <= 40


def test_the_terminal_is_given_back_when_training_breaks(tmp_path, terminal):
    class Broken(Model):
        def training_step(self, batch, batch_idx):
            raise RuntimeError

    def run():
        with pytest.raises(RuntimeError):
            new_trainer(tmp_path, new_progress(1e9)).fit(Broken())
        print("after")

    shown = terminal(run)
    assert HIDE in shown
    assert BAR in shown
    assert shown.endswith(f"{SHOWN_AND_ERASED}after\r\n")
