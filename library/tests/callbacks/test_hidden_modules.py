"""Nets and metrics that are no part of the module: in containers, objects and ``__dict__``."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn

from library.tests.kit import Net, Scores, check_same, fit, rows, weights
from samestep.callbacks.attributes import Attributes


class Streak(torchmetrics.Metric):
    """Counts in Python, as many metrics of one's own do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def update(self, value: torch.Tensor) -> None:
        self.seen.append(float(value))

    def compute(self) -> torch.Tensor:
        return torch.tensor(sum(self.seen[-3:]))


@dataclass
class Book:
    metric: Any
    others: list[Any]


class Teacher(nn.Module):
    """A moving average that counts its updates, and caches what it has made."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(net)
        self.num_updates = 0
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def follow(self, net: nn.Module) -> None:
        self.num_updates += 1
        for old, new in zip(self.net.parameters(), net.parameters(), strict=True):
            old.data.lerp_(new.data, 1 / (1 + self.num_updates))
        self.last = self.net.weight.detach().sum()


def make_collection() -> torchmetrics.MetricCollection:
    return torchmetrics.MetricCollection(
        {"mean": torchmetrics.MeanMetric(), "sum": torchmetrics.SumMetric()}
    )


class Hides(Net):
    def __init__(self) -> None:
        super().__init__()
        self.running = torchmetrics.RunningMean(window=5)
        self.streak = Streak()
        self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.in_dict = {"mean": torchmetrics.MeanMetric(), "all": make_collection()}
        self.in_list = [torchmetrics.RunningSum(window=3), Streak()]
        self.in_object = Book(torchmetrics.CatMetric(), [torchmetrics.MaxMetric()])
        self.teachers = [Teacher(self.head)]
        self.__dict__["teacher"] = Teacher(self.body)
        # Its weights are in the checkpoint already.
        self.__dict__["same"] = nn.Sequential(self.body, self.head)

    def find_metrics(self) -> list[Any]:
        metrics = [self.running, self.streak, self.range, *self.in_dict.values(), *self.in_list]
        return [*metrics, self.in_object.metric, *self.in_object.others]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for number, metric in enumerate(self.find_metrics()):
            metric.update(loss.detach())
            value = metric.compute()
            values = value if isinstance(value, dict) else {"": value}
            for name, value in values.items():
                self.log(f"metric/{number}{name}", value.sum())
        self.teacher.follow(self.body)
        self.teachers[0].follow(self.head)
        self.log("last", self.teacher.last + self.teachers[0].last)
        return loss + (self.teacher.net.weight - self.body.weight).square().mean()

    def on_train_epoch_end(self) -> None:
        self.streak.reset()


class Watching(L.Callback):
    def __init__(self) -> None:
        self.mean = torchmetrics.MeanMetric()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.mean.update(outputs["loss"])
        pl_module.log("callback", self.mean.compute())


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_run_continues_with_hidden_nets_and_metrics(tmp_path: Path, how: str, capsys):
    options: Any = {"callbacks": lambda: [Watching()], "logger": True}
    fit(tmp_path / "whole", Hides, **options)
    # Three starts: the second one saves what it has restored.
    places = [(0, 2), (1, 1)]
    options |= {"how": how, "save_every_s": 1e-9}
    parts = fit(tmp_path / "parts", Hides, places=places, **options)
    assert len(parts) == 3
    check_same(tmp_path / "parts", tmp_path / "whole")
    assert set(weights(tmp_path / "parts")) == set(Net().state_dict())
    assert "metric/0" in rows(tmp_path / "whole")[0]
    assert "Note: " not in capsys.readouterr().out


class Tracks(Scores):
    """Has parts that only its own code makes."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.hidden = [torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)]

    def on_train_epoch_start(self):
        self.hidden[0].increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        (tracker,) = self.hidden
        if not tracker._increment_called:
            tracker.increment()
        tracker.update(loss.detach())
        return loss


def test_parts_that_a_restart_does_not_have_are_named(tmp_path: Path, capsys):
    fit(tmp_path, Tracks, places=[(1, 1)])
    said = capsys.readouterr().out
    (note,) = [line for line in said.splitlines() if "first values" in line and "holds v" in line]
    assert "cannot be restored in this program" in note
    assert "Tracks.hidden" in note


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.mean.update(batch)
        return batch


def test_a_metric_of_a_datamodule_is_named(tmp_path: Path):
    (part,) = fit(tmp_path, lambda: without_validation(Net()), Data)
    (attributes,) = [one for one in part.trainer.callbacks if isinstance(one, Attributes)]
    assert attributes.lost == ["Data.mean"]


def without_validation(module: Any) -> Any:
    module.validation_step = None
    return module
