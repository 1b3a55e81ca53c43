"""A run that was stopped or killed anywhere, and continued, equals one that was not disturbed.

Its weights and the rows of metrics.csv are compared, for modules in other people's style.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    Timer,
)
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from library.tests.canaries import needs_averaging
from library.tests.kit import Net, Place, batches, check_exact, fit, weights
from samestep.callbacks.checkpoints import Checkpoints
from samestep.loops import find_callback
from samestep.run import record, save_interval

pytestmark = pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric")

# An epoch has four batches.
PLACES: list[Place] = [(0, 3), (1, 0), (1, 1), (1, "validation"), (2, "start"), (2, 0)]


def check(tmp_path: Path, make: Callable[[], Any], **options: Any) -> None:
    """Compare runs of this module, disturbed at all places and not. They save at each step."""
    default = {"max_epochs": 4, "monitor": "val_loss", "how": "both", "save_every_s": 1e-9}
    _, parts = check_exact(tmp_path, make, batches, *PLACES, **default | options)
    assert len(parts) > 3


def sgd(module: L.LightningModule) -> SGD:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def scheduled(*configs: dict[str, Any]) -> Callable[[L.LightningModule], Any]:
    """Such a ``configure_optimizers``: each configuration has a function in place of a schedule."""

    def configure(module: L.LightningModule) -> Any:
        optimizer = sgd(module)
        built = [config | {"scheduler": config["scheduler"](optimizer)} for config in configs]
        return [optimizer], built

    return configure


plateau = {
    "scheduler": partial(ReduceLROnPlateau, patience=0, threshold=0.5, factor=0.7),
    "monitor": "val_loss",
    "strict": False,
}
one_cycle = scheduled(
    {"scheduler": partial(OneCycleLR, max_lr=0.2, total_steps=16), "interval": "step"}
)
plateaus = scheduled(
    plateau, plateau | {"frequency": 2}, plateau | {"monitor": "train_loss", "interval": "step"}
)
several = scheduled(  # apart from the plateaus, whose changes others here would overwrite
    {"scheduler": partial(StepLR, step_size=2)},
    {"scheduler": partial(CosineAnnealingLR, T_max=4)},
    {"scheduler": lambda o: LambdaLR(o, lambda n: 0.9**n), "interval": "step", "frequency": 3},
    {"scheduler": lambda o: ChainedScheduler([StepLR(o, 2), LinearLR(o)], optimizer=o)},
    {"scheduler": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 1)], milestones=[1])},
)


# torch 2.8 warns of what a schedule of its own does.
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_schedules(tmp_path: Path):
    check(tmp_path / "one cycle", lambda: Net(one_cycle))
    check(tmp_path / "several", lambda: Net(several))
    check(tmp_path / "plateaus", lambda: Net(plateaus), how="SIGKILL", save_every_s=300)


OPTIONS: list[dict[str, Any]] = [
    {"max_steps": 14, "max_epochs": -1, "check_val_every_n_epoch": 2},
    {"max_steps": 14, "val_check_interval": 2},
    {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_train_batches": 3},
    {"min_epochs": 4, "accumulate_grad_batches": 2, "max_steps": 7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_limits(tmp_path: Path, options: dict[str, Any]):
    check(tmp_path, lambda: Net(plateaus), **options)


class Unfreezes(Net):
    """Adds its body to the optimizer in the second epoch, with batch norm that was frozen."""

    def __init__(self) -> None:
        super().__init__(lambda module: Adam(module.head.parameters(), lr=0.1))
        self.body = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))
        self.body.eval().requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.train().requires_grad_(True)
            self.optimizers().add_param_group({"params": self.body.parameters(), "lr": 0.01})


def with_backbone() -> Net:
    """As BackboneFinetuning needs it."""
    net = Net(lambda module: SGD(module.head.parameters(), lr=0.1, momentum=0.9))
    net.backbone = net.body
    return net


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
def test_fine_tuning(tmp_path: Path):
    check(tmp_path / "own", Unfreezes)
    check(tmp_path / "callback", with_backbone, callbacks=lambda: [BackboneFinetuning(1)])


def averages_every_other_epoch() -> L.Callback:
    class EveryOtherEpoch(callbacks.WeightAveraging):
        def should_update(self, step_idx=None, epoch_idx=None) -> bool:
            return epoch_idx is not None and epoch_idx % 2 == 1

    return EveryOtherEpoch()


class Scales(L.Callback):
    """Multiplies the rate of learning by a number that it keeps itself."""

    def __init__(self) -> None:
        self.factor = 1.0

    def on_train_batch_start(self, trainer, *args) -> None:
        self.factor *= 0.9
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * self.factor

    def state_dict(self) -> dict[str, float]:
        return {"factor": self.factor}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.factor = state_dict["factor"]


CALLBACKS = {
    "of steps": lambda: [
        callbacks.EMAWeightAveraging(decay=0.5), GradientAccumulationScheduler({1: 2, 3: 4}),
        Scales(), LearningRateMonitor(), Timer(), LambdaCallback(),
    ],
    "of epochs": lambda: [
        averages_every_other_epoch(), EarlyStopping("val_loss", patience=1, min_delta=0.5)
    ],
}  # fmt: skip


@needs_averaging
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks(tmp_path: Path, make: Any):
    check(tmp_path, lambda: Net(sgd), callbacks=make)


class Gan(Net):
    """Two optimizers, stepped by hand, and a schedule for each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        body, head = Adam(self.body.parameters(), lr=0.1), SGD(self.head.parameters(), lr=0.1)
        return [body, head], [StepLR(body, 1), ReduceLROnPlateau(head, patience=0)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def on_train_epoch_end(self):
        steps, plateau = self.lr_schedulers()
        steps.step()
        plateau.step(self.trainer.callback_metrics["val_loss"])


def test_optimizers_stepped_by_hand(tmp_path: Path):
    check(tmp_path, Gan)


class Unwrapped(Net):
    """Steps the optimizer itself, and not what Lightning wraps: no step of it is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        (optimizer,) = self.trainer.optimizers
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_steps_that_lightning_does_not_count_are_saved(tmp_path: Path, capsys):
    checkpoints = partial(Checkpoints, str(tmp_path / "parts/checkpoints"), every_n_epochs=1)
    options: dict[str, Any] = {"callbacks": lambda: [checkpoints()], "save_every_s": 1e-9}
    fit(tmp_path / "parts", Unwrapped, places=[(0, 1), (1, 0)], **options)
    printed = capsys.readouterr().out
    assert "Stopped by SIGTERM after batch 2; saved." in printed
    assert "Stopped by SIGTERM after batch 5; saved." in printed
    # The first epoch keeps its own weights, though all checkpoints are of the step 0.
    first, second = (weights(tmp_path / "parts", f"epoch-000{number}") for number in (1, 2))
    assert not torch.equal(first["head.bias"], second["head.bias"])
    check_exact(tmp_path / "compared", Unwrapped, batches, (0, 1), (1, 0), (1, "validation"))


def test_a_run_that_chooses_when_it_saves_continues_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(save_interval, "SHORTEST_S", 0)
    monkeypatch.setattr(save_interval, "FRACTION", 1e9)
    options: dict[str, Any] = {"how": "SIGKILL", "save_every_s": "auto"}
    _, parts = check_exact(tmp_path, Net, batches, (0, 2), (1, 1), **options)
    first, second, third = (part.seen[0][:2] for part in parts)
    # A save that is due while the one before is written comes a step later.
    assert first == (0, 0)
    assert second in {(0, 1), (0, 2)}
    assert third in {(1, 0), (1, 1)}
    # Once in each start that has completed a save: that of the other run, and those of this one.
    prices = [find_callback(part.trainer, Checkpoints).interval.price_s for part in parts]
    assert prices[-1] is not None
    num_announced = 1 + len(prices) - prices.count(None)
    assert capsys.readouterr().out.count("(save_every_s=auto): a save costs") == num_announced

    known = record.read(tmp_path / "parts")
    assert known.save_price_s > 0
    (more,) = fit(tmp_path / "parts", max_epochs=3, **options)
    assert find_callback(more.trainer, Checkpoints).interval.expected_s == known.save_price_s
