"""Objects that the module of a library saves into its checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from library.tests.kit import Net, batches, check_exact, fit
from samestep.callbacks.stand_ins import MARK, StandIns
from samestep.heap.heap import Heap
from samestep.ranks import environment
from samestep.run.checkpoint import CheckpointError, load


class Scale:
    """Changes in each step: an encoder of a library that learns."""

    def __init__(self) -> None:
        self.seen = {"steps": 0}
        self.factor = torch.ones(1)

    def step(self) -> None:
        self.seen["steps"] += 1
        self.factor = self.factor * 0.9


class OfLibrary(Net):
    """Saves its loss, metrics and encoder as objects, as darts and pytorch-forecasting do."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion: Any = nn.MSELoss()
        self.metrics: Any = MetricCollection({"mean": MeanMetric()})
        self.scale = Scale()
        self.where = Path("a")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.scale.step()
        self.metrics.update(loss.detach())
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        return loss * self.scale.factor.item() + self.criterion(loss, loss.detach())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["loss_fn"] = self.criterion
        checkpoint["specials"] = {"metrics": self.metrics, "others": [self.scale, self.where, 3]}

    def on_load_checkpoint(self, checkpoint):
        self.criterion = checkpoint["loss_fn"]
        self.metrics = checkpoint["specials"]["metrics"]
        self.scale, self.where, three = checkpoint["specials"]["others"]
        assert three == 3


class Moves(OfLibrary):
    """An object that cannot be encoded changes."""

    def on_train_batch_end(self, *args):
        self.where = Path(str(self.global_step))


def test_objects_of_a_module_continue_with_their_values(tmp_path: Path, capsys):
    _, parts = check_exact(tmp_path, OfLibrary, batches, (0, 1), (1, 2), how="both")
    assert parts[-1].module.scale.seen == {"steps": 8}
    notes = [line for line in capsys.readouterr().out.splitlines() if "of these objects" in line]
    names = (
        "loss_fn (MSELoss), specials.metrics (MetricCollection), specials.others.0 (Scale), "
        "specials.others.1 (PosixPath)"
    )
    assert notes
    assert all(note.endswith(f"the program makes: {names}") for note in notes)


def test_a_checkpoint_holds_no_object(tmp_path: Path):
    fit(tmp_path, OfLibrary)
    # Which reads tensors and plain values only.
    saved = load(tmp_path / "checkpoints/last.ckpt")
    assert saved["loss_fn"][MARK] == "torch.nn.modules.loss:MSELoss"
    assert saved["specials"]["others"][0][MARK].endswith(":Scale")
    trainer: Any = fit(tmp_path, OfLibrary)[0].trainer
    given = {"dataloaders": batches(shuffle=False), "verbose": False}
    trainer.validate(OfLibrary(), ckpt_path=str(tmp_path / "checkpoints/last.ckpt"), **given)


def test_a_path_that_training_chooses_is_kept(tmp_path: Path, capsys):
    _, parts = check_exact(tmp_path, Moves, batches, (1, 2))
    assert parts[-1].module.where == Path("8")
    assert "restored" not in capsys.readouterr().out


def saved_by(module: Any) -> dict[str, Any]:
    stand_ins = StandIns(module)
    stand_ins.keys_of_others = {"state_dict"}
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    taken, _ = stand_ins.take_out(checkpoint)
    return taken


def test_values_that_cannot_be_restored_are_noted_by_rank_zero(capsys, monkeypatch):
    module = OfLibrary()
    module.scale.step()
    saved = saved_by(module)
    monkeypatch.setattr(Heap, "_write", lambda self, name, field, new: False)
    for rank in (0, 1):
        monkeypatch.setattr(environment, "rank", partial(int, rank))
        found = StandIns(OfLibrary()).put_back(saved)
        assert found["specials"]["others"][0].seen == {"steps": 0}
    (note,) = [
        line for line in capsys.readouterr().out.splitlines() if "cannot be restored" in line
    ]
    assert "values of checkpoint" in note


@pytest.mark.parametrize("name", ["os:system", "torch.nn.modules.loss:L1Loss"])
def test_a_file_makes_no_object(name: str):
    """Whatever it names: only the program's own object gets its place."""
    saved = saved_by(OfLibrary())
    with pytest.raises(CheckpointError, match=r"loss_fn was a \w+, and OfLibrary makes a MSELoss"):
        StandIns(OfLibrary()).put_back(saved | {"loss_fn": {MARK: name}})
    with pytest.raises(CheckpointError, match=r"other was a \w+, and OfLibrary makes nothing"):
        StandIns(OfLibrary()).put_back(saved | {"other": {MARK: name}})


def test_a_module_without_objects_is_not_asked_for_them():
    class Counts(L.LightningModule):
        def on_save_checkpoint(self, checkpoint):
            raise AssertionError

    assert StandIns(Counts()).put_back({"state_dict": {}}) == {"state_dict": {}}
