import logging
import random
from argparse import Namespace
from collections import deque
from enum import Enum
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MaxMetric, MeanMetric

from library.tests.kit import Net, Place, Scores, batches, check_exact, fit
from samestep.callbacks.objects import Objects


class Buffer:
    def __init__(self):
        self.memory: deque[Any] = deque(maxlen=3)


class Phase(Enum):
    WARM, MAIN = 1, 2


class Transition(NamedTuple):
    indices: np.ndarray[Any, Any]
    reward: np.float32
    phase: Phase


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
        self.generator = torch.Generator()
        self.last = self.indices = None
        self.teacher = [torch.nn.Linear(2, 1)]
        self.outputs: list[torch.Tensor] = []
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))
        self.best = MaxMetric()
        self.train_mean = MeanMetric()
        self.val_mean = MeanMetric()
        # No state: they never change, or every epoch begins with the same.
        self.rate, self.sizes, self.phase = 0.5, [1, 2], "warm"
        self.val_outputs: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.momentum = 0.9 * self.momentum + 1
        self.hidden = loss.detach()
        self.options.done += 1
        self.moments["second"][0] += 1.0
        self.replay.memory.append((batch, 1.0))
        self.phase = "hot"
        self.rng.random()
        self.dice.random()
        self.indices = torch.randperm(4, generator=self.generator)
        self.last = Transition(self.indices.numpy(), np.float32(loss.item()), Phase.MAIN)
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


def state_of(model: Stateful) -> list[str]:
    """All that it keeps, as text that is equal if the bits are."""
    tensors = [model.hidden, *model.outputs, model.cache, model.kept, model.teacher[0].weight]
    for batch, reward in model.replay.memory:
        tensors += [*batch, torch.tensor(reward)]
    assert len(tensors) > 5
    return [
        *(str(tensor.tolist()) for tensor in tensors),
        str((model.options, model.momentum, model.moments, model.phase, len(model.outputs))),
        str((model.rng.bit_generator.state, model.dice.getstate())),
        str((model.generator.get_state().tolist(), model.indices, model.last)),
        str(model.best.compute()),
    ]


def test_a_run_continues_with_what_its_attributes_held(tmp_path: Path):
    (whole,) = fit(tmp_path / "whole", Stateful)
    stops: list[Place] = [(0, 0), (0, 2), (1, "start"), (1, 2)]
    for how, places in (("SIGTERM", stops), ("SIGKILL", [(0, 1), (1, 1)])):
        *_, last = fit(tmp_path / how, Stateful, places=places, how=how)
        assert state_of(last.module) == state_of(whole.module)


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


def test_callbacks_of_the_user_count_on(tmp_path: Path):
    made: list[Any] = []

    def callbacks() -> list[L.Callback]:
        made[:] = [Counter(), SavedCounter(), HalfSavedCounter(), Counter()]
        return made[:]

    fit(tmp_path, places=[(0, 1), (0, 2)], callbacks=callbacks)
    assert [callback.count for callback in made] == [8, 8, 8, 8]
    assert made[2].total == 8.5


def lost_by(part) -> list[str]:
    (objects,) = [one for one in part.trainer.callbacks if isinstance(one, Objects)]
    return objects.lost


class Exchanges(Net):
    """What it exchanges while it trains can be imported by its name, or cannot."""

    shared = 1.0

    def __init__(self):
        super().__init__()
        self.extra: Any = torch.nn.Tanh()
        self.function: Any = torch.nn.functional.mse_loss
        self.kind: Any = torch.nn.MSELoss
        self.how: Any = self.first
        self.local: Any = None
        self.others: Any = None
        # Nothing changes these.
        self.rate, self.sizes, self.lock = 0.5, [1, 2], Lock()

    def first(self, loss):
        return loss

    def second(self, loss):
        return 2 * loss

    def training_step(self, batch, batch_idx):
        self.others = self.others or cycle([1.0, 2.0])
        next(self.others)
        loss = self.extra(super().training_step(batch, batch_idx))
        zero = torch.zeros_like(loss)
        return self.shared * self.how(loss + self.function(loss, zero) + self.kind()(loss, zero))

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.extra = torch.nn.ReLU()
            self.function, self.kind = torch.nn.functional.l1_loss, torch.nn.L1Loss
            self.how = self.second
            type(self).shared = 0.5


class ExchangesForGood(Exchanges):
    def on_train_epoch_start(self):
        self.function = lambda a, b: (a - b).abs()
        self.local = self.local or make_local()


def make_local() -> Any:
    class Local:
        pass

    return Local()


def test_what_is_exchanged_is_kept_if_it_can_be_imported(tmp_path: Path, capsys):
    def make() -> Exchanges:
        Exchanges.shared = 1.0
        return Exchanges()

    check_exact(tmp_path, make, batches, (1, 0), (1, 2))
    assert "Note: " not in capsys.readouterr().out


def test_what_cannot_be_kept_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    *_, part = fit(tmp_path, ExchangesForGood, places=[(1, 2)])
    names = {f"ExchangesForGood.{name}" for name in ("function", "local")}
    assert set(lost_by(part)) == names
    said = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint" in line]
    first, again = said
    assert "ExchangesForGood.function, ExchangesForGood.local. A run that resumes" in first
    assert again.startswith("Note: this run continues with the first values of ")


class Told(torch.optim.lr_scheduler.LRScheduler):
    """Leaves a part of what it keeps out of its ``state_dict``."""

    def __init__(self, optimizer):
        self.second = False
        super().__init__(optimizer)

    def get_lr(self):
        self.second |= self.last_epoch == 3
        return [rate * (0.3 if self.second else 1) for rate in self.base_lrs]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict):
        self.last_epoch = state_dict["last_epoch"]


def counting(optimizer: Any) -> Any:
    calls = [0]

    def factor(step: int) -> float:
        calls[0] += 1
        return 1 / calls[0]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@pytest.mark.parametrize("schedule", [Told, counting])
def test_what_a_schedule_leaves_out_continues(tmp_path: Path, schedule: Any):
    def configure(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        return [optimizer], [{"scheduler": schedule(optimizer), "interval": "step"}]

    check_exact(tmp_path, lambda: Net(configure), batches, (0, 1), (1, 1))


class Shares(Net):
    """Its data set reads what its steps write."""

    def __init__(self):
        super().__init__()
        self.memory = [torch.ones(1)]
        self.count = 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.memory.append(batch[:1].detach() + 1)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(Memory(self.memory))


class Memory(Dataset[torch.Tensor]):
    def __init__(self, memory: list[torch.Tensor]) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.memory[-1]


def test_what_the_data_share_with_the_module_continues_exactly(tmp_path: Path):
    check_exact(tmp_path, Shares, lambda: None, (0, 2), (1, 1))


class Schedules(Net):
    """Changes what torch's own objects hold as numbers of Python, and its data."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.1)

    def training_step(self, batch, batch_idx):
        return self.drop(super().training_step(batch, batch_idx) + torch.ones(8)).mean()

    def on_train_epoch_start(self):
        loader = self.trainer.train_dataloader
        if self.current_epoch == 1:
            self.drop.p = 0.6
            loader.sampler.weights[:4] *= 20
            loader.dataset.dataset.tensors[0][3:] += 1
            loader.dataset.indices += range(8)


def scheduled() -> Any:
    data = Subset(TensorDataset(torch.arange(16.0)[:, None]), [*range(8)])
    weights = torch.ones(8, dtype=torch.double)
    return DataLoader(data, 2, sampler=WeightedRandomSampler(weights, 8))


def test_settings_of_layers_samplers_and_subsets_continue(tmp_path: Path, capsys):
    check_exact(tmp_path, Schedules, scheduled, (1, 0), (1, 2))
    assert "Note: the training data are other" not in capsys.readouterr().out


def from_attributes(module: Net) -> Any:
    return DataLoader(torch.arange(16.0)[:, None], module.size, shuffle=True)


class Grows(Net):
    """Its loader is made of the first value, and has got another batch size since."""

    def __init__(self):
        super().__init__()
        self.size = 2

    def train_dataloader(self):
        return from_attributes(self)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.train_dataloader.batch_sampler.batch_size = self.size = 4


def test_a_loader_is_made_of_first_values_and_changed_as_it_was(tmp_path: Path, capsys):
    check_exact(tmp_path, Grows, lambda: None, (0, 1), (1, 1))
    assert "Note: " not in capsys.readouterr().out


class Moves(Shares):
    """The same in a hook of the transfer, which comes after the save."""

    def train_dataloader(self):
        return DataLoader(torch.ones(4, 1))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self.memory[-1]


def test_what_a_transfer_reads_and_steps_change_continues_exactly(tmp_path: Path):
    check_exact(tmp_path, Moves, lambda: None, (0, 2), (1, 1))


class Ready(Net):
    """Gives its attributes their first values when training starts, and counts its epochs."""

    def on_train_start(self):
        self.momentum, self.defaults = 0.0, DEFAULTS
        self.epochs = 0

    def on_train_epoch_start(self):
        self.epochs += 1

    def training_step(self, batch, batch_idx):
        self.momentum = 0.9 * self.momentum + 1
        self.defaults = {"rate": self.momentum}
        return super().training_step(batch, batch_idx)


DEFAULTS = {"rate": 0.0}


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_it_is_written_after_the_first_values_and_before_the_first_hook(tmp_path: Path, how: str):
    (whole,) = fit(tmp_path / "whole", Ready)
    places: list[Place] = [(0, "start"), (0, 3), (1, "start"), (1, 1)]
    *_, last = fit(tmp_path / "disturbed", Ready, places=places, how=how)
    assert (last.module.momentum, last.module.epochs) == (whole.module.momentum, 2)
    assert last.module.defaults == whole.module.defaults
    assert DEFAULTS == {"rate": 0.0}  # was not changed in place, so it is not written in place


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.drawn = 0

    def train_dataloader(self):
        def count(batch):
            self.drawn += 1
            return torch.stack(batch)

        return DataLoader(torch.ones(8, 32), batch_size=2, collate_fn=count)

    def val_dataloader(self):
        return DataLoader(torch.ones(2, 32))


def test_ordinary_models_lose_nothing():
    nets = [torch.nn.LSTM(4, 4), torch.nn.BatchNorm1d(4), torch.nn.TransformerEncoderLayer(4, 2)]
    nets.append(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4)))
    for data in (None, Data()):
        model, lost = BoringModel(), Objects()
        model.nets = torch.nn.ModuleList(nets)
        trainer = L.Trainer(
            max_epochs=2, callbacks=[lost], accelerator="cpu", enable_model_summary=False,
            enable_checkpointing=False, limit_train_batches=3, limit_val_batches=2, logger=False,
            enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(model, datamodule=data)
        assert lost.lost == []


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

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.epoch)])


class Tells(Net):
    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.epoch = self.current_epoch


def test_what_a_data_set_is_told_continues(tmp_path: Path, capsys):
    check_exact(tmp_path, Tells, lambda: DataLoader(Numbered()), (1, 1))
    assert "Note: batch" not in capsys.readouterr().out


def test_what_a_loader_counts_itself_is_noticed(tmp_path: Path, capsys):
    fit(tmp_path, Net, Fast, [(1, 1)])
    said = capsys.readouterr().out
    assert "Note: batch 2 of epoch 1 is another one than it was before the interruption" in said
    assert "training data 0.epoch is in no checkpoint" in said
