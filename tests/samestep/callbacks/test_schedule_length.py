from functools import partial
from pathlib import Path

import pytest
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from samestep.callbacks.last_checkpoint import LastCheckpoint
from tests.samestep.callbacks.tiny import STEPS_PER_EPOCH, Tiny, fit

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*treespec, LeafSpec"
)
one_cycle = partial(OneCycleLR, max_lr=0.1)


@pytest.fixture(autouse=True)
def _signals_end_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.ranks.stopping.defer", lambda: None)


def falling(optimizer, total_steps):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total_steps))


def two_parts(optimizer, total_steps):
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, total_steps - 2)]
    return SequentialLR(optimizer, parts, milestones=[2])


def plateau(optimizer, total_steps):
    return ReduceLROnPlateau(optimizer, patience=0)


def rates(run_dir: Path, schedule, *lengths: int) -> dict[int, float]:
    """Learning rate of each step of a run that continues, each time with more epochs."""
    lrs = {}
    for attempt, epochs in enumerate(lengths):
        model = Tiny([0.5], schedule)
        ckpt = "last.ckpt" if attempt else None
        fit(run_dir, model, max_epochs=epochs, ckpt=ckpt)
        lrs |= model.lrs
    return lrs


@pytest.mark.parametrize("schedule", [one_cycle, falling])
def test_a_run_that_becomes_longer_gets_the_schedule_of_its_new_length(tmp_path: Path, schedule):
    longer = rates(tmp_path / "longer", schedule, 2, 4)
    whole = rates(tmp_path / "whole", schedule, 4)
    first = 2 * STEPS_PER_EPOCH  # of the continued run; it still has the rate of the checkpoint
    assert len(longer) == len(whole) == 4 * STEPS_PER_EPOCH
    assert longer[0] == whole[0]
    assert longer[1] != whole[1]
    assert {s: lr for s, lr in longer.items() if s > first} == {
        s: pytest.approx(lr) for s, lr in whole.items() if s > first
    }


@pytest.mark.parametrize("schedule", [two_parts, plateau])
def test_other_schedules_go_on_too(tmp_path: Path, schedule):
    assert len(rates(tmp_path, schedule, 2, 4)) == 4 * STEPS_PER_EPOCH


def test_the_patience_of_a_plateau_is_not_forgotten(tmp_path: Path):
    lrs = rates(tmp_path, plateau, 2, 4)
    assert lrs[11] == pytest.approx(0.1)
    assert lrs[12] == pytest.approx(0.01)  # the score of before was not reached


@pytest.mark.parametrize("schedule", [one_cycle, falling, two_parts])
def test_a_run_of_the_same_length_has_the_same_rates(tmp_path: Path, schedule, monkeypatch):
    whole = rates(tmp_path / "whole", schedule, 3)
    save = LastCheckpoint.on_train_epoch_end

    def save_and_end(self, trainer, pl_module):
        save(self, trainer, pl_module)
        if trainer.current_epoch == 0:
            raise KeyboardInterrupt

    model = Tiny([0.5], schedule)
    with monkeypatch.context() as patch:
        patch.setattr(LastCheckpoint, "on_train_epoch_end", save_and_end)
        with pytest.raises(SystemExit):
            fit(tmp_path / "cut", model)
    rest = Tiny([0.5], schedule)
    fit(tmp_path / "cut", rest, ckpt="last.ckpt")
    assert model.lrs | rest.lrs == whole
