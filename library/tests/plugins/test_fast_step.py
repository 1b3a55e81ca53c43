"""The short way through a step against Lightning's own: the same hooks, logs, counters, weights."""

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)

from library.tests.canaries import needs_locked_lightning
from library.tests.kit import LeavesData, LeavesObjects, Net
from samestep import loops
from samestep.plugins import fast_step

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = [
    name
    for name, _ in inspect.getmembers(L.Callback, inspect.isfunction)
    if name.startswith("on_") and "checkpoint" not in name
]


class Noted(Net):
    """Notes what happens to it, and logs in each way."""

    def __init__(self, seen: list[Any], configure: Any = None) -> None:
        super().__init__(configure)
        self.seen = seen

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(("step", self._current_fx_name, batch_idx, float(batch[0].sum())))
        loss = self.loss(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch_only", loss * 2, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", float(batch_idx), on_step=True)
        loss = outputs["loss"].item() if outputs else None
        self.seen.append(("end", self._current_fx_name, loss, self.trainer.global_step))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(("zero", self._current_fx_name, type(optimizer).__name__))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]))


class OneArgument(Noted):
    def training_step(self, batch: Any) -> Any:
        return super().training_step(batch, -1)


class Dictionary(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["more"])


class NoLoss(Noted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx != 1 else None


class EndsEpoch(Noted):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class OwnStep(Noted):
    def optimizer_step(self, *args: Any, **named: Any) -> None:
        self.seen.append("own step")
        super().optimizer_step(*args, **named)


class OwnSchedule(Noted):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append(("schedule", self._current_fx_name, scheduler.last_epoch, metric))
        super().lr_scheduler_step(scheduler, metric)


class Moves(Noted):
    """Changes its batches on their way, and notes in which hook it is."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append((self._current_fx_name, dataloader_idx))
        return [batch[0] * 2]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append((self._current_fx_name, dataloader_idx))
        return [batch[0] + 1]


class Data(L.LightningDataModule):
    """Moves its batches itself, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_moved = 0

    def train_dataloader(self) -> Any:
        return batches()

    val_dataloader = train_dataloader

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.num_moved += 1
        return [batch[0].to(device) * self.num_moved]


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append(("logged", step, dict(metrics)))

    def log_hyperparams(self, *args: Any) -> None:
        pass


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(7.0)[:, None])


def batches() -> Iterable[Any]:
    return DataLoader(TensorDataset(torch.arange(12.0)[:, None]), batch_size=2)


def of_stream() -> Iterable[Any]:
    return DataLoader(Endless(), batch_size=2, collate_fn=lambda rows: [torch.stack(rows)])


def add_another_and_stop(seen: list[Any]) -> L.Callback:
    """Adds a callback in the middle of an epoch, and ends the run early."""
    other = LambdaCallback(on_train_batch_start=lambda *_: seen.append("another"))

    def act(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.callbacks.append(other)  # type: ignore[attr-defined]
        trainer.should_stop = trainer.global_step == 4

    return LambdaCallback(on_train_batch_end=act)


def schedule(interval: str, **options: Any) -> Callable[[L.LightningModule], Any]:
    def configure(module: L.LightningModule) -> Any:
        adam = torch.optim.Adam(module.parameters(), 0.01)
        falling = torch.optim.lr_scheduler.StepLR(adam, 2)
        if "monitor" in options:
            falling = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0)
        return [adam], [{"scheduler": falling, "interval": interval, **options}]

    return configure


def lbfgs(module: L.LightningModule) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)


ORDINARY: dict[str, tuple[type[Noted], dict[str, Any]]] = {
    "one argument, a schedule of steps": (OneArgument, {"configure": schedule("step")}),
    "its own step of a schedule": (OwnSchedule, {"configure": schedule("step", frequency=3)}),
    "a dictionary, a plateau": (
        Dictionary, {"configure": schedule("step", monitor="loss_step"), "gradient_clip_val": 1e-3},
    ),
    "no loss, a schedule of epochs": (NoLoss, {"configure": schedule("epoch")}),
    "ends the epoch": (EndsEpoch, {}),
    "own transfers, validated within": (Moves, {"val_check_interval": 0.5}),
    "a DataModule, few steps": (Noted, {"data": Data, "max_steps": 8}),
    "L-BFGS": (Noted, {"configure": lbfgs, "max_epochs": 1}),
    "validated by steps": (Noted, {"val_check_interval": 4, "check_val_every_n_epoch": None}),
    "bf16-mixed": (Noted, {"precision": "bf16-mixed", "gradient_clip_val": 1e-3}),
    "no length": (Noted, {"data": of_stream, "val_check_interval": 2}),
    "one more callback, stopped early": (Noted, {"callback": add_another_and_stop}),
}  # fmt: skip
OTHERS: dict[str, tuple[type[Noted], dict[str, Any]]] = {
    "accumulated": (Noted, {"accumulate_grad_batches": 4}),
    "its own step": (OwnStep, {}),
    "16-mixed": (Noted, {"plugins": [MixedPrecision("16-mixed", "cpu")]}),
    "a profiler": (Noted, {"profiler": "simple"}),
}


def run(kind: type[Noted], is_ours: bool, **options: Any) -> tuple[list[Any], int]:
    """Train, and note all that is seen from outside; and how many steps were ordinary."""
    seen: list[Any] = []
    num_ordinary = 0
    make, data = options.pop("callback", None), options.pop("data", batches)
    module = kind(seen, options.pop("configure", None))

    def note(name: str) -> Callable[..., None]:
        return lambda trainer, module, *args: seen.append(
            (name, module._current_fx_name, *[plain(arg) for arg in args])
        )

    hooks = LambdaCallback(**{name: note(name) for name in NAMES})
    more = [make(seen)] if make else []
    trainer = L.Trainer(
        **{"max_epochs": 2} | copy.deepcopy(options), accelerator="cpu", logger=Memory(seen),
        log_every_n_steps=2,
        callbacks=[hooks, *more, LeavesData(), LeavesObjects()], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if is_ours:
        loops.install(trainer)
        loop: Any = trainer.fit_loop.epoch_loop
        step = getattr(loop, "_step", None)

        def count_and_step(*args: Any) -> Any:
            nonlocal num_ordinary
            num_ordinary += 1
            return step(*args)  # type: ignore[misc]

        loop._step = count_and_step
    loaders = data()
    is_module = isinstance(loaders, L.LightningDataModule)
    trainer.fit(module, loaders) if is_module else trainer.fit(module, loaders, batches())
    weights = hashlib.sha256(torch.cat([p.flatten() for p in module.parameters()]).detach().numpy())
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    seen += [weights.hexdigest(), metrics, trainer.fit_loop.state_dict(), module._current_fx_name]
    return seen, num_ordinary


def plain(value: Any) -> Any:
    """A value of a hook, so that two can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__


has_short_form = pytest.mark.skipif(
    not fast_step.knows_lightnings_step(), reason="every step is Lightning's own"
)


@has_short_form
@pytest.mark.parametrize("name", [*ORDINARY, *OTHERS])
def test_a_run_is_the_same_by_lightnings_own_loop(name: str):
    kind, options = (ORDINARY | OTHERS)[name]
    theirs, _ = run(kind, False, **options)
    ours, num_ordinary = run(kind, True, **options)
    assert len(theirs) > 50
    for one, other in zip(theirs, ours, strict=True):
        assert one == other
    assert (num_ordinary > 0) is (name in ORDINARY)


@has_short_form
def test_an_optimizer_must_call_its_closure():
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            pass

    with pytest.raises(RuntimeError, match="has not called its closure"):
        run(Noted, True, configure=lambda module: Idle(module.parameters(), 0.1))


@needs_locked_lightning
def test_canary_a_step_of_lightning_has_these_parts():
    """``FastEpochLoop`` does all of it; with another version every step is Lightning's own."""
    assert fast_step.knows_lightnings_step(), "read what has changed, then write STEP_DIGEST anew"


def test_an_unknown_lightning_trains_by_its_own_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(fast_step, "STEP_DIGEST", "of another version")
    fast_step.knows_lightnings_step.cache_clear()
    theirs, _ = run(Noted, False)
    ours, num_ordinary = run(Noted, True)
    fast_step.knows_lightnings_step.cache_clear()
    assert (theirs, num_ordinary) == (ours, 0)
    assert caplog.text.count("takes its steps in another way") == 1
