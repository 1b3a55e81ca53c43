"""Seconds and learning rate of each epoch."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from library.tests.kit import Net, fit
from samestep.callbacks import epoch_times
from samestep.run.metrics import read_history


class Clock:
    """Advances by one second for each training step."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("options", [{}, {"places": [(1, 2)], "how": "SIGKILL"}], ids=str)
def test_each_epoch_has_its_seconds_and_learning_rate(tmp_path: Path, monkeypatch, options: Any):
    clock = Clock()
    monkeypatch.setattr(epoch_times, "time", clock)

    class Ticking(Net):
        def __init__(self) -> None:
            super().__init__(self.configure_two_rates)
            clock.now += 1000  # nobody trains

        def configure_two_rates(self, module):
            optimizer = SGD(module.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": StepLR(optimizer, 4), "interval": "step"}]

        def training_step(self, batch, batch_idx):
            clock.now += 1
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Ticking, save_every_s=1e-9, **options)
    rows = [row for row in read_history(tmp_path) if "lr" in row]
    # Of four steps each; what the killed process did after its last checkpoint does not count.
    assert [row["time/epoch_s"] for row in rows] == [4, 4]
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.001])
    figures = json.loads((tmp_path / "metrics.json").read_text())
    assert (figures["time/epoch_s"], figures["time/total_s"]) == (4, 8)
