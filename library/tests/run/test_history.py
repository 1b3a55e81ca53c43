"""``metrics.csv`` and ``metrics.json``. After an interruption: library/tests/callbacks."""

import csv
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from library.tests.kit import Net, batches, fit, rows
from samestep.run.files import WriteError
from samestep.run.history import History
from samestep.run.metrics import read_history


class Logs(Net):
    """Logs once per epoch, in its steps and in a hook."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("fit_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("of_each_batch", 1.0, on_step=True, on_epoch=False)
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def on_train_epoch_end(self):
        self.log("train/samples_per_second", 1 / 3 + self.current_epoch)


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of three epochs, which was tested."""
    run_dir = tmp_path_factory.mktemp("tested")
    (part,) = fit(run_dir, Logs, max_epochs=3, log_every_n_steps=50, monitor="val_loss")
    (metrics,) = part.trainer.test(part.module, batches(shuffle=False), verbose=False)
    return run_dir, metrics["test_loss"]


def test_there_is_one_row_per_epoch_and_each_figure_once(tested):
    run_dir, loss = tested
    with (run_dir / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"]) for row in table] == [
        ("0", "3"), ("1", "7"), ("2", "11"), ("3", "12")
    ]  # fmt: skip
    assert all(row["fit_loss"] and row["val_loss"] for row in table[:3])
    assert [bool(row["test_loss"]) for row in table] == [False, False, False, True]
    assert read_history(run_dir)[-1]["test_loss"] == loss, "metrics are read back exactly"


def test_final_metrics_are_the_newest_of_each_and_no_speeds(tested, tmp_path: Path):
    run_dir, loss = tested
    last = read_history(run_dir)[2]
    assert last["train/samples_per_second"]
    metrics = json.loads((run_dir / "metrics.json").read_text())
    assert {name: v for name, v in metrics.items() if not name.startswith("time/")} == {
        "fit_loss": last["fit_loss"], "test_loss": loss, "val_loss": last["val_loss"],
    }  # fmt: skip
    history = History(tmp_path)
    history.log_metrics({"val_loss": 2.0, "g_loss": 1.0, "lrap": 0.5}, 0)
    history.log_metrics({"epoch": 0, "step/lr": 0.1, "lr": 0.1, "lr-Adam/pg1": 0.1}, 0)
    assert history.last() == {"g_loss": 1.0, "lrap": 0.5, "val_loss": 2.0}


class FewSteps(Net):
    """Steps after every second batch. More steps than batches: test_continuing.py."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), 0.1))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.log("fit_loss", float(batch_idx), on_step=False, on_epoch=True)
        if batch_idx % 2:
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()


@pytest.mark.parametrize("model", [Logs, FewSteps])
def test_the_rows_are_those_of_the_checkpoint_and_count_batches(tmp_path: Path, model):
    """Whatever has happened to the file meanwhile."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(whole, model, max_epochs=3, log_every_n_steps=50)
    fit(parts, model, max_epochs=1, log_every_n_steps=50)
    path = parts / "metrics.csv"
    path.write_text(path.read_text().replace("0.0", "0.4") + "0,99\n")
    fit(parts, model, max_epochs=3, log_every_n_steps=50)
    assert rows(parts) == rows(whole)
    assert [row["step"] for row in rows(whole)] == ["3", "7", "11"]


def test_a_full_disk_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("samestep.run.history.write_text", refuse)
    history = History(tmp_path)
    with pytest.raises(WriteError, match=r"metrics.csv cannot be written: No space .* free "):
        history.finalize("success")
    history.finalize("failed")  # the error that came first is on its way


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "1")
    history = History(tmp_path)
    history.log_metrics({"train/loss": 1.0}, step=0)
    history.finalize("success")
    assert list(tmp_path.iterdir()) == []
