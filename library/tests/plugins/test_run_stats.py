"""Loss and learning rate of steps, seconds and learning rate of epochs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from library.tests.kit import Net, batches, check_exact, fit
from samestep.plugins import run_stats
from samestep.run.metrics import read_history


def test_the_rate_is_the_one_with_which_the_step_was_taken(tmp_path: Path):
    def halve(module):
        optimizer = SGD(module.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}]

    fit(tmp_path, lambda: Net(halve), max_steps=3)
    rows = read_history(tmp_path)
    rates = {row["step"]: row["step/lr"] for row in rows if "step/lr" in row}
    assert rates == {0: 0.5, 1: 0.25, 2: 0.125}


def test_a_module_may_train_without_an_optimizer(tmp_path: Path):
    """Such as one that only collects what it sees; Lightning warns of it."""
    with pytest.warns(UserWarning, match="this fit will run with no optimizer"):
        check_exact(tmp_path, lambda: Net(lambda module: None), batches, (1, 1), how="SIGKILL")
    rows = read_history(tmp_path / "whole")
    assert any("step/loss" in row for row in rows)
    assert not any("step/lr" in row or "lr" in row for row in rows)


def test_the_norm_of_the_gradient_is_that_before_clipping(tmp_path: Path):
    norms = []

    class Normed(Net):
        def on_after_backward(self):
            gradients = [parameter.grad for parameter in self.parameters()]
            norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())

    fit(tmp_path, Normed, max_epochs=1, log_every_n_steps=2, gradient_clip_val=1e-4)
    rows = read_history(tmp_path)
    logged = {row["step"]: row["step/gradient_norm"] for row in rows if "step/gradient_norm" in row}
    assert len(norms) == 4
    assert logged == {1: pytest.approx(norms[1]), 3: pytest.approx(norms[3])}


def test_a_step_of_several_batches_has_one_norm(tmp_path: Path):
    fit(tmp_path, max_epochs=1, accumulate_grad_batches=2)
    norms = [row for row in read_history(tmp_path) if "step/gradient_norm" in row]
    assert len(norms) == 2


def test_each_epoch_has_the_use_of_the_machine(tmp_path: Path):
    fit(tmp_path)
    rows = [row for row in read_history(tmp_path) if "system/cpu_cores" in row]
    assert [row["epoch"] for row in rows] == [0, 1]
    for row in rows:
        assert row["system/cpu_cores"] > 0
        assert 0.05 < row["system/memory_gib"] < 100
        assert "system/gpu_memory_gib" not in row
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert not any(name.startswith(("system/", "step/")) for name in metrics)


KILLED: Any = {"places": [(1, 2)], "how": "SIGKILL"}


class Clock:
    """Advances by one second for each training step."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_macos_counts_memory_in_bytes(monkeypatch: pytest.MonkeyPatch):
    in_kib = run_stats.peak_memory_gib()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run_stats.peak_memory_gib() == pytest.approx(in_kib / 1024, rel=0.1)


def test_each_epoch_has_its_seconds_and_learning_rate(tmp_path: Path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run_stats, "time", clock)

    class Ticking(Net):
        def __init__(self) -> None:
            super().__init__(self.configure_two_rates)
            clock.now += 1000  # the run is stopped

        def configure_two_rates(self, module):
            optimizer = SGD(module.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": StepLR(optimizer, 4), "interval": "step"}]

        def training_step(self, batch, batch_idx):
            clock.now += 1
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Ticking, save_every_s=1e-9, **KILLED)
    rows = [row for row in read_history(tmp_path) if "lr" in row]
    # Of four steps each; what the killed process did after its last checkpoint does not count.
    assert [row["time/epoch_s"] for row in rows] == [4, 4]
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.001])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["time/epoch_s"], metrics["time/total_s"]) == (4, 8)


def test_an_epoch_shorter_than_the_interval_has_what_its_last_step_logs(tmp_path: Path):
    fit(tmp_path, log_every_n_steps=50, save_every_s=1e-9, **KILLED)
    rows = [row for row in read_history(tmp_path) if "lr" in row]
    assert [row["step"] for row in rows] == [3, 7]
    assert all(row["train_loss"] > 0 and row["epoch"] == i for i, row in enumerate(rows))
    assert json.loads((tmp_path / "metrics.json").read_text())["train_loss"] > 0


def test_a_short_epoch_has_four_values_between_its_ends(tmp_path: Path):
    fit(tmp_path, data=lambda: batches(36), log_every_n_steps=50, max_epochs=2)
    steps = [row["step"] for row in read_history(tmp_path) if "step/loss" in row]
    assert steps == [1, 3, 5, 7, 9, 11, 13, 15, 17]


class LogsItself(Net):
    """Logs the mean of the epoch too, under the name that ours would have."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/score", float(batch_idx), on_step=True)
        self.log("train/score_epoch", -1.0, on_step=False, on_epoch=True)
        self.log("seen", float(batch_idx), on_step=True)
        return loss


@pytest.mark.parametrize("places", [[], [(0, 1), (1, 0)]], ids=["undisturbed", "interrupted"])
def test_a_loss_per_step_has_its_mean_over_the_samples_of_the_epoch(tmp_path: Path, places):
    fit(tmp_path, LogsItself, lambda: batches(10), places)
    rows = read_history(tmp_path)
    means = [row["train_loss_epoch"] for row in rows if "train_loss_epoch" in row]
    for epoch, mean in enumerate(means):
        losses = [row["train_loss"] for row in rows if row["epoch"] == epoch]
        # Batches of 4, 4 and 2 samples.
        assert mean == pytest.approx((4 * losses[0] + 4 * losses[1] + 2 * losses[2]) / 10)
    assert len(means) == 2
    assert {row["train/score_epoch"] for row in rows if "train/score_epoch" in row} == {-1.0}
    assert not any("seen_epoch" in row for row in rows), "it does not describe the training"
    final = json.loads((tmp_path / "metrics.json").read_text())
    assert final["train_loss"] == means[-1]
    assert "train_loss_epoch" not in final


def test_a_learning_rate_is_the_number_that_was_typed(tmp_path: Path):
    rate = torch.tensor(0.01)
    fit(tmp_path, lambda: Net(lambda module: SGD(module.parameters(), lr=rate)))
    text = (tmp_path / "metrics.csv").read_text()
    assert ",0.01," in text
    assert "0.00999" not in text
