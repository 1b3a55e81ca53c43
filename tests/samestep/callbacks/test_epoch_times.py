"""Seconds and learning rate of each epoch."""

from pathlib import Path

import pytest
import torch

from samestep.callbacks import epoch_times
from samestep.callbacks.epoch_times import EpochTimes
from samestep.run.history import History
from tests.samestep.callbacks.tiny import Tiny, fit


class Clock:
    """Advances by one second for each training step."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Ticking(Tiny):
    """Stops after ``stop_after`` steps of all starts."""

    def __init__(self, clock: Clock, stop_after: int = 99) -> None:
        super().__init__([1.0], torch.optim.lr_scheduler.LinearLR)
        self.schedule = lambda optimizer, total_steps: torch.optim.lr_scheduler.StepLR(optimizer, 4)
        self.clock, self.stop_after = clock, stop_after

    def training_step(self, batch, batch_idx):
        if self.global_step == self.stop_after:
            raise KeyError
        self.clock.now += 1
        return super().training_step(batch, batch_idx)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(epoch_times, "time", clock)
    return clock


def test_each_epoch_has_its_seconds_and_learning_rate(tmp_path: Path, clock: Clock):
    history = History(tmp_path)
    fit(tmp_path, Ticking(clock), history, EpochTimes(), max_epochs=2)
    rows = list(history.rows.values())
    assert [row["time/epoch_s"] for row in rows] == [4, 4]  # four steps
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.001])
    assert history.last() == {"time/total_s": 8, "time/epoch_s": 4}


# All samples are equal, so that the loader need not know where it was.
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_an_interrupted_epoch_counts_what_was_saved(tmp_path: Path, clock: Clock):
    with pytest.raises(KeyError):
        fit(tmp_path, Ticking(clock, 6), History(tmp_path), EpochTimes(), every_s=-1, max_epochs=2)
    clock.now += 1000  # nobody trains
    history = History(tmp_path)
    # The last checkpoint is that of step 6: two steps of epoch 2 were taken.
    fit(tmp_path, Ticking(clock), history, EpochTimes(), ckpt="last.ckpt", max_epochs=2)
    assert [row["time/epoch_s"] for row in history.rows.values() if "lr" in row][-1] == 4
