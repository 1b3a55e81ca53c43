import logging
import random
from argparse import Namespace
from collections import deque
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MaxMetric, MeanMetric

from library.tests.kit import Net, Scores, fit
from samestep.callbacks.lost_state import LostState, find_own_state


class Buffer:
    def __init__(self):
        self.memory: deque[Any] = deque(maxlen=3)


class Stateful(Scores):
    """State in all the places that people choose."""

    def __init__(self):
        super().__init__(1.0)
        self.log_of_steps = logging.getLogger("test")
        self.options = Namespace(done=0)
        self.momentum = 0.0
        self.hidden = None
        self.moments = {"first": torch.zeros(2), "second": [0.0]}
        self.replay = Buffer()
        self.rng = np.random.default_rng(0)
        self.dice = random.Random(0)
        self.teacher = [torch.nn.Linear(2, 1)]
        self.outputs: list[torch.Tensor] = []
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        self.best = MaxMetric()
        # No state: they never change, a checkpoint holds them, or every epoch begins with the same.
        self.rate, self.sizes, self.phase = 0.5, [1, 2], "warm"
        self.val_outputs: list[torch.Tensor] = []
        self.train_mean = MeanMetric()
        self.val_mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.momentum = 0.9 * self.momentum + 1
        self.hidden = loss.detach()
        self.options.done += 1
        self.moments["second"][0] += 1.0
        self.replay.memory.append((batch, 1.0))
        self.rng.random()
        self.dice.random()
        self.teacher[0].weight.data += 1
        self.outputs.append(loss.detach())
        self.cache += 1
        self.kept += 1
        self.train_mean(loss)
        self.log("train/mean", self.train_mean)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.val_outputs.append(batch)
        self.val_mean(batch[0].sum())
        self.log("val/mean", self.val_mean)

    def on_train_epoch_end(self):
        self.outputs.clear()

    def on_validation_epoch_end(self):
        self.val_outputs.clear()
        self.best(self.global_step)


FOUND = {
    "momentum", "hidden", "moments", "replay", "rng", "dice", "teacher", "outputs", "cache",
    "best", "options",
}  # fmt: skip


class Counter(L.Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, *args):
        self.count += 1


class SavedCounter(Counter):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


class HalfSavedCounter(SavedCounter):
    def __init__(self):
        super().__init__()
        self.total = 0.5

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.total += 1


def lost_by(part) -> set[str]:
    (lost,) = [one for one in part.trainer.callbacks if isinstance(one, LostState)]
    return {name for name in lost.names if not name.startswith("Observer.")}  # of these tests


def test_state_in_attributes_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def callbacks() -> list[L.Callback]:
        return [Counter(), SavedCounter(), HalfSavedCounter()]

    (part,) = fit(tmp_path, Stateful, callbacks=callbacks)
    names = {f"Stateful.{name}" for name in FOUND} | {"Counter.count", "HalfSavedCounter.total"}
    assert lost_by(part) == names
    said = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    first, second = said
    assert "no checkpoint holds them: Stateful.options, Stateful.momentum" in first
    # It changes in validation only.
    assert "Stateful.best" in second
    assert "Stateful.options" not in second


def test_a_run_that_continues_says_so_before_its_first_step(tmp_path: Path, capsys):
    for epochs in (1, 3):
        capsys.readouterr()
        fit(tmp_path, callbacks=lambda: [Counter()], max_epochs=epochs)
    line, *_ = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint h" in line]
    assert line.startswith("Note: this run continues with the first values of ")
    assert "Counter.count" in line


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.drawn = 0

    def train_dataloader(self):
        def count(batch):
            self.drawn += 1
            return torch.stack(batch)

        return DataLoader(torch.ones(8, 32), batch_size=2, collate_fn=count)


@pytest.mark.parametrize(
    "net",
    [torch.nn.LSTM(4, 4), torch.nn.BatchNorm1d(4), torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(4, 4)), torch.nn.TransformerEncoderLayer(4, 2)],
    ids=lambda net: type(net).__name__,
)  # fmt: skip
def test_ordinary_models_lose_nothing(tmp_path: Path, net):
    model, lost = BoringModel(), LostState()
    model.net = net
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        max_epochs=2, callbacks=[lost], accelerator="cpu", enable_model_summary=False,
        enable_checkpointing=False, limit_train_batches=3, limit_val_batches=2, **options,
    )  # fmt: skip
    trainer.fit(model)
    assert lost.names == []


def test_a_datamodule_has_state_too(tmp_path: Path):
    lost = LostState()
    trainer = L.Trainer(
        max_epochs=1, callbacks=[lost], accelerator="cpu", enable_model_summary=False,
        enable_checkpointing=False, logger=False, enable_progress_bar=False, limit_val_batches=0,
    )  # fmt: skip
    model = BoringModel()
    model.validation_step = None
    trainer.fit(model, datamodule=Data())
    assert lost.names == ["Data.drawn"]


class Extra(torch.nn.Linear):
    """Counts in a way of its own."""

    def get_extra_state(self):
        return {"count": 3}


def test_methods_that_save_for_rank_zero_only_are_found():
    model = Net()
    assert find_own_state(model) == []
    model.body = Extra(1, 4)
    assert find_own_state(model) == ["Extra.get_extra_state"]


def test_several_ranks_are_told_what_only_rank_zero_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(L.Trainer, "world_size", 2)
    model = Net()
    model.body = Extra(1, 4)
    trainer = L.Trainer(logger=False, accelerator="cpu")
    LostState().on_train_start(trainer, model)
    assert "keep what Extra.get_extra_state saves on rank zero only" in capsys.readouterr().out


class Fast:
    """A loader of one's own, which counts its epochs."""

    epoch = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        self.epoch += 1
        return iter(torch.full((4, 1), float(self.epoch)))


class Numbered(Dataset[torch.Tensor]):
    """The model tells it the epoch, which Lightning does not."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.epoch)])


class Tells(Net):
    def on_train_epoch_start(self):
        loader = self.trainer.train_dataloader
        if isinstance(loader, DataLoader):
            loader.dataset.set_epoch(self.current_epoch)


@pytest.mark.parametrize(
    ("make", "name"), [(Fast, "Fast.epoch"), (lambda: DataLoader(Numbered()), "Numbered.epoch")]
)
def test_what_a_loader_keeps_from_epoch_to_epoch_is_named(tmp_path: Path, make, name: str, capsys):
    fit(tmp_path, Tells, make)
    said = capsys.readouterr().out
    assert "no checkpoint holds them" in said
    assert name in said
    assert ("Fast, which has a way of its own to iterate" in said) == (make is Fast)
