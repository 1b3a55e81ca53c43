from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from library.tests import kit
from library.tests.callbacks.tiny import STEPS_PER_EPOCH, Tiny, fit
from library.tests.kit import Killed, Net, check_exact
from samestep.errors import ConfigError

one_cycle = partial(OneCycleLR, max_lr=0.1)


def falling(optimizer, total_steps):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))


def two_parts(optimizer, total_steps):
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, total_steps - 2)]
    return SequentialLR(optimizer, parts, milestones=[2])


def plateau(optimizer, total_steps):
    return ReduceLROnPlateau(optimizer, patience=0)


class Ends(L.Callback):
    """Ends the process, so to say, when the second epoch begins."""

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == 1:
            raise Killed


def fit_one_epoch(run_dir: Path, model: Tiny) -> None:
    """Train the first of three epochs."""
    with pytest.raises(Killed):
        fit(run_dir, model, Ends(), max_epochs=3)


def rates(run_dir: Path, schedule, *lengths: int) -> dict[int, float]:
    """Learning rate of each step of a run that continues, each time with more epochs."""
    lrs = {}
    for attempt, epochs in enumerate(lengths):
        model = Tiny([0.5], schedule)
        ckpt = "last.ckpt" if attempt else None
        fit(run_dir, model, max_epochs=epochs, ckpt=ckpt)
        lrs |= model.lrs
    return lrs


def test_a_run_that_becomes_longer_gets_the_schedule_of_its_new_length(tmp_path: Path):
    longer = rates(tmp_path / "longer", one_cycle, 2, 4)
    whole = rates(tmp_path / "whole", one_cycle, 4)
    first = 2 * STEPS_PER_EPOCH  # of the continued run; it still has the rate of the checkpoint
    assert len(longer) == len(whole) == 4 * STEPS_PER_EPOCH
    assert longer[0] == whole[0]
    assert longer[1] != whole[1]
    assert {s: lr for s, lr in longer.items() if s > first} == {
        s: pytest.approx(lr) for s, lr in whole.items() if s > first
    }


class WithOptimizer(Tiny):
    """Learns with the given optimizer, and notes its weight decay too."""

    def __init__(self, schedule, make_optimizer) -> None:
        super().__init__([0.5], schedule)
        self.make_optimizer = make_optimizer
        self.decays: dict[int, float] = {}

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        schedule = self.schedule(optimizer, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        self.decays[self.global_step] = self.trainer.optimizers[0].param_groups[0]["weight_decay"]
        return super().training_step(batch, batch_idx)


def sgd(lr: float, weight_decay: float = 0.0):
    return partial(SGD, lr=lr, momentum=0.9, weight_decay=weight_decay)


def cycle_up_to(max_lr: float):
    return partial(OneCycleLR, max_lr=max_lr)


@pytest.mark.parametrize(
    ("old_schedule", "new_schedule", "more_epochs"),
    [
        (None, None, 0),
        # Its cosine continues from the last rate, so another length is another curve.
        (two_parts, two_parts, 0),
        (cycle_up_to(0.1), cycle_up_to(1), 2),
    ],
    ids=["none", "two parts", "one_cycle, longer"],
)
def test_a_changed_learning_rate_and_weight_decay_are_taken(
    tmp_path: Path, old_schedule, new_schedule, more_epochs: int
):
    """The rates after the change are those of a run that had the new values from the start."""
    epochs = 3 + more_epochs
    old, new = sgd(0.1, weight_decay=0.01), sgd(1.0, weight_decay=0.03)
    whole = WithOptimizer(new_schedule, new)
    fit(tmp_path / "whole", whole, max_epochs=epochs)
    fit_one_epoch(tmp_path / "cut", WithOptimizer(old_schedule, old))
    rest = WithOptimizer(new_schedule, new)
    fit(tmp_path / "cut", rest, max_epochs=epochs, ckpt="last.ckpt")
    first = min(rest.lrs)
    assert first == STEPS_PER_EPOCH
    # With another length of the run the first step still has the position of the checkpoint.
    exact = {s: lr for s, lr in rest.lrs.items() if s > first or not more_epochs}
    assert exact == {s: pytest.approx(whole.lrs[s]) for s in exact}
    assert set(rest.decays.values()) == {0.03}


def test_the_momentum_of_a_run_is_not_lost_with_a_change(tmp_path: Path):
    fit(tmp_path, WithOptimizer(None, sgd(0.1)), max_epochs=1)
    trainer = fit(tmp_path, WithOptimizer(None, sgd(0.01)), max_epochs=1, ckpt="last.ckpt")
    (state,) = {id(p): s for p, s in trainer.optimizers[0].state.items() if p.ndim > 1}.values()
    assert state["momentum_buffer"].abs().sum() > 0


def test_another_kind_of_optimizer_or_schedule_is_rejected(tmp_path: Path):
    fit(tmp_path, WithOptimizer(falling, sgd(0.1)), max_epochs=1)
    for schedule, optimizer, message in (
        (falling, Adam, "cannot continue with Adam of 2 tensors, .*its checkpoint has SGD of 2"),
        (two_parts, sgd(0.1), "continue with .*SequentialLR: its checkpoint has .*LambdaLR"),
        (None, sgd(0.1), "cannot continue with SGD of 2 tensors: .*SGD of 2 tensors, LambdaLR"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(tmp_path, WithOptimizer(schedule, optimizer), ckpt="last.ckpt")


def test_the_patience_of_a_plateau_is_not_forgotten(tmp_path: Path):
    lrs = rates(tmp_path / "longer", plateau, 2, 4)
    assert lrs == rates(tmp_path / "whole", plateau, 4)
    assert lrs[8] == pytest.approx(0.01)  # the second epoch did not reach the score of the first


class Changes(Net):
    """Has other parts from its second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change()


class AddsLayer(Changes):
    def change(self) -> None:
        self.tail = torch.nn.Linear(1, 1)
        self.trainer.optimizers[0].add_param_group({"params": [*self.tail.parameters()]})


class RemovesBias(Changes):
    def change(self) -> None:
        self.head.bias = None


class SwitchesOptimizer(Changes):
    def change(self) -> None:
        self.trainer.optimizers = [SGD(self.parameters(), 0.1)]


class TrainsHiddenLayer(Changes):
    def change(self) -> None:
        self.hidden = [torch.nn.Linear(1, 1)]
        self.trainer.optimizers[0].add_param_group({"params": [*self.hidden[0].parameters()]})


@pytest.mark.parametrize(
    ("kind", "note", "message"),
    [
        (AddsLayer, "tail.weight is new, tail.bias is new", "the model has no tail.bias"),
        (RemovesBias, "head.bias is gone", "it has no head.bias"),
        (
            SwitchesOptimizer,
            "SGD of 4 tensors has replaced Adam of 4 tensors",
            "cannot continue with Adam of 4 tensors: its checkpoint has SGD of 4 tensors",
        ),
        (
            TrainsHiddenLayer,
            "an optimizer has got parameters that are not in the module",
            r"with Adam of 4 tensors: its checkpoint has Adam of 4 tensors \+ Adam of 2 tensors",
        ),
    ],
)
def test_what_only_the_program_can_make_is_said_when_it_is_saved(
    tmp_path: Path, capsys, kind, note: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        kit.fit(tmp_path, kind, places=[(1, 1)], save_every_s=1e-9)
    before_stop, _, _ = capsys.readouterr().out.partition("Stopped by SIGTERM")
    assert before_stop.count(f"Note: since training began {note}. A later start can") == 1


class Rebuilds(AddsLayer):
    """Makes its layer again before it is loaded, and gives it to the optimizer itself."""

    def loss(self, batch):
        tail = getattr(self, "tail", torch.nn.Identity())
        return tail(super().loss(batch)[None]).sum()

    def on_load_checkpoint(self, checkpoint) -> None:
        if "tail.weight" in checkpoint["state_dict"]:
            self.tail = torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        groups = [[*self.body.parameters(), *self.head.parameters()]]
        if hasattr(self, "tail"):
            groups.append([*self.tail.parameters()])
        return Adam([{"params": group} for group in groups], lr=0.01)


def test_a_module_that_rebuilds_itself_continues(tmp_path: Path):
    check_exact(tmp_path, Rebuilds, kit.batches, (0, 1), (1, 0), (1, 2))


class Remembers(SwitchesOptimizer):
    """Makes its second optimizer again before it is loaded."""

    phase = 0

    def change(self) -> None:
        self.phase = 1
        self.trainer.optimizers = [self.configure_optimizers()]

    def configure_optimizers(self):
        if self.phase:
            return SGD(self.parameters(), 0.1, momentum=0.9)
        return Adam(self.parameters(), 0.01)

    def on_save_checkpoint(self, checkpoint) -> None:
        checkpoint["phase"] = self.phase

    def on_load_checkpoint(self, checkpoint) -> None:
        self.phase = checkpoint["phase"]


def test_an_optimizer_that_the_program_makes_again_keeps_its_values(tmp_path: Path):
    check_exact(tmp_path, Remembers, kit.batches, (0, 1), (1, 0), (1, 2))
