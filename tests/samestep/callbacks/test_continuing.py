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
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    Timer,
    WeightAveraging,
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
from torch.utils.data import TensorDataset

from samestep.callbacks.changed_values import ChangedValues
from samestep.callbacks.checkpoints import BestCheckpoint, LastCheckpoint, StopBetweenSteps
from samestep.callbacks.exact import ResumeOrder, SeedSteps
from samestep.data.loader import BatchLoader
from samestep.ranks import stopping
from samestep.run.checkpoint import AtomicCheckpointIO
from samestep.run.history import History

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*treespec, LeafSpec",
    "ignore:You're resuming from a checkpoint that ended before",
    "ignore:ReduceLROnPlateau conditioned on metric",
)

NUM_BATCHES = 4  # of an epoch

Place = tuple[str, int, int]  # a hook, and the epoch and the batch (-1: the last) of its call
PLACES: list[Place] = [
    ("on_train_batch_end", 0, -1),
    ("on_train_batch_end", 1, 0),
    ("on_train_batch_end", 1, 1),
    ("on_validation_start", 1, -1),
    ("on_train_epoch_start", 2, -1),
    ("on_train_batch_end", 2, 0),
]


@pytest.fixture(autouse=True)
def _signals_end_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.ranks.stopping.defer", lambda: None)
    monkeypatch.setattr(stopping._State, "signum", 0)


class Net(L.LightningModule):
    """A body and a head; ``configure`` is its ``configure_optimizers``."""

    def __init__(self, configure: Callable[[L.LightningModule], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 1)
        self.configure = configure or (lambda module: SGD(module.parameters(), lr=0.1))

    def loss(self, batch) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.head(self.body(x).tanh()), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return self.configure(self)


class Disturber(L.Callback):
    """Stops or kills the run at each of the places, once."""

    def __init__(self, how: str) -> None:
        self.left = list(PLACES)
        self.how = how

    def _disturb(self, hook: str, trainer: L.Trainer, batch: int = -1) -> None:
        last = trainer.num_training_batches - 1
        here = (hook, trainer.current_epoch, -1 if batch == last else batch)
        if here not in self.left:
            return
        self.left.remove(here)
        if self.how == "SIGTERM":
            stopping._State.signum = 15
        else:
            raise KeyboardInterrupt  # LastCheckpoint saves nothing then

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._disturb("on_train_batch_end", trainer, batch_idx)

    def on_validation_start(self, trainer, pl_module) -> None:
        self._disturb("on_validation_start", trainer)

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self._disturb("on_train_epoch_start", trainer)


def fit(run_dir: Path, model: L.LightningModule, *callbacks: L.Callback, **options) -> Any:
    """Train, from last.ckpt if it is there. Returns weights and rows, and the Trainer."""
    data = torch.randn(4 * NUM_BATCHES, 5, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(data[:, :4], data[:, 4:])
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    last = LastCheckpoint(str(folder), options.pop("every_s", 300))
    last.best = BestCheckpoint(str(folder), options.pop("monitor", "val_loss"), "min")
    history = History(run_dir)
    trainer = L.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False,
        default_root_dir=run_dir, plugins=[AtomicCheckpointIO()],
        callbacks=[
            StopBetweenSteps(last), history, SeedSteps(0), ResumeOrder(0), ChangedValues(),
            last.best, last, *callbacks
        ],
        **{"max_epochs": 4, "log_every_n_steps": 1, "num_sanity_val_steps": 0} | options,
    )  # fmt: skip
    trainer.loggers = [history]
    train = BatchLoader(dataset, 4, shuffle=True, seed=0)
    ckpt = folder / "last.ckpt"
    trainer.fit(model, train, BatchLoader(dataset, 8), ckpt_path=ckpt if ckpt.exists() else None)
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return weights, history.rows, trainer


def assert_same(
    tmp_path: Path, make: Callable[[], tuple[L.LightningModule, Any]], how: str, **options: Any
) -> None:
    """Compare a run that is disturbed at all places with one that is not."""
    model, callbacks = make()
    weights, rows, trainer = fit(tmp_path / "whole", model, *callbacks, **options)
    disturber = Disturber(how.removesuffix(", saved at each step"))
    if how.endswith("each step"):
        options["every_s"] = -1
    num_attempts, again = 0, None
    while again is None:
        model, callbacks = make()
        num_attempts += 1
        try:
            again = fit(tmp_path / "cut", model, *callbacks, disturber, **options)
        except SystemExit:
            stopping._State.signum = 0
    assert num_attempts > 3
    assert again[1] == rows
    assert again[0] == weights
    assert again[2].global_step == trainer.global_step
    assert again[2].current_epoch == trainer.current_epoch


def scheduled(*configs: dict[str, Any]) -> Callable[[L.LightningModule], Any]:
    """Such a ``configure_optimizers``: each configuration has a function in place of a schedule."""

    def configure(module: L.LightningModule) -> Any:
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        built = [config | {"scheduler": config["scheduler"](optimizer)} for config in configs]
        return [optimizer], built

    return configure


plateau = {
    "scheduler": partial(ReduceLROnPlateau, patience=0, threshold=0.5),
    "monitor": "val_loss",
    "strict": False,
}
SCHEDULES = {
    "plateau": scheduled(plateau),
    "plateau every 2 epochs": scheduled(plateau | {"frequency": 2}),
    "plateau each step": scheduled(plateau | {"monitor": "train_loss", "interval": "step"}),
    "one cycle": scheduled(
        {"scheduler": partial(OneCycleLR, max_lr=0.2, total_steps=16), "interval": "step"}
    ),
    "several": scheduled(
        {"scheduler": partial(StepLR, step_size=2)},
        {"scheduler": partial(CosineAnnealingLR, T_max=4)},
        {"scheduler": lambda o: LambdaLR(o, lambda n: 0.9**n), "interval": "step", "frequency": 3},
    ),
    "composed": scheduled(
        {"scheduler": lambda o: ChainedScheduler([StepLR(o, 2), LinearLR(o)], optimizer=o)},
        {"scheduler": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 1)], milestones=[1])},
    ),
}
SAVED = "SIGKILL, saved at each step"


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", SAVED])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(tmp_path: Path, schedule: str, how: str):
    assert_same(tmp_path, lambda: (Net(SCHEDULES[schedule]), ()), how)


OPTIONS: list[dict[str, Any]] = [
    {"max_steps": 14, "check_val_every_n_epoch": 2},
    {"max_steps": 9, "limit_train_batches": 3},
    {"max_steps": 14, "max_epochs": -1},
    {"val_check_interval": 2, "max_steps": 14},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"min_epochs": 4, "min_steps": 3},
    {"accumulate_grad_batches": 2, "max_steps": 7},
    {"reload_dataloaders_every_n_epochs": 2},
    {"overfit_batches": 2, "num_sanity_val_steps": 2},
]


@pytest.mark.parametrize("how", ["SIGTERM", SAVED])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_limits(tmp_path: Path, options: dict[str, Any], how: str):
    assert_same(tmp_path, lambda: (Net(SCHEDULES["plateau"]), ()), how, **options)


class Unfreezes(Net):
    """Adds its body to the optimizer in the second epoch, with batch norm that was frozen."""

    def __init__(self) -> None:
        super().__init__(lambda module: Adam(module.head.parameters(), lr=0.1))
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.body.eval().requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.train().requires_grad_(True)
            self.optimizers().add_param_group({"params": self.body.parameters(), "lr": 0.01})


class Stages(BaseFinetuning):
    """Unfreezes the body in the second epoch, and its bias before it."""

    def freeze_before_training(self, pl_module) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer)


def with_backbone() -> Net:
    """As BackboneFinetuning needs it."""
    net = Net(lambda module: SGD(module.head.parameters(), lr=0.1, momentum=0.9))
    net.backbone = net.body
    return net


FINE_TUNING = {
    "add_param_group": lambda: (Unfreezes(), ()),
    "BaseFinetuning": lambda: (with_backbone(), [Stages()]),
    "BackboneFinetuning": lambda: (with_backbone(), [BackboneFinetuning(1)]),
}


@pytest.mark.parametrize("how", ["SIGTERM", SAVED])
@pytest.mark.parametrize("make", FINE_TUNING.values(), ids=FINE_TUNING)
@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
def test_fine_tuning(tmp_path: Path, make: Any, how: str):
    assert_same(tmp_path, make, how)


class EveryOtherEpoch(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None) -> bool:
        return epoch_idx is not None and epoch_idx % 2 == 1


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
    "average of steps": lambda: [EMAWeightAveraging(decay=0.5)],
    "average of epochs": lambda: [EveryOtherEpoch()],
    "accumulation": lambda: [GradientAccumulationScheduler({1: 2, 3: 4})],
    "early stopping": lambda: [EarlyStopping("val_loss", patience=1, min_delta=0.5)],
    "watching": lambda: [
        LearningRateMonitor(),
        Timer(interval="epoch"),
        LambdaCallback(),
    ],
    "state of its own": lambda: [Scales()],
}


@pytest.mark.parametrize("how", ["SIGTERM", SAVED])
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks(tmp_path: Path, make: Any, how: str):
    assert_same(tmp_path, lambda: (Net(), make()), how)


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


@pytest.mark.parametrize("how", ["SIGTERM", SAVED])
def test_optimizers_stepped_by_hand(tmp_path: Path, how: str):
    assert_same(tmp_path, lambda: (Gan(), ()), how)
