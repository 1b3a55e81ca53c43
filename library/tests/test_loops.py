"""The loops against Lightning's own: the same hooks, logs, counters and weights."""

import copy
import hashlib
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops import fetchers
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
    _LoggerConnector,
)
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from library.tests.canaries import Sources, check_sources, needs_locked_lightning
from library.tests.kit import LeavesData, LeavesObjects, Net, check_exact, check_same, fit
from library.tests.programs import PATIENCE_S, until
from samestep import BatchLoader, loops
from samestep.ranks import stopping

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
        step = loop._step

        def count_and_step(args: Any) -> Any:
            nonlocal num_ordinary
            num_ordinary += 1
            return step(args)

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
    not loops.knows_lightnings_step(), reason="every step is Lightning's own"
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


CANARIES: dict[str, Sources] = {
    "broadcasts every step": [(_TrainingEpochLoop.advance, ["self._broadcast_sigterm_tensor()"])],
    "repeats and leaves out when it restarts": [
        (_TrainingEpochLoop.advance, ["self._skip_next_val = True\n                return"]),
        (_FitLoop, ["restarting and epoch_unfinished or self._iteration_based_training()"]),
        (_FitLoop, ["if not self.restarting and self.epoch_loop._num_ready_batches_reached()"]),
        (_TrainingEpochLoop.run, ["self.reset()"]),
    ],
    "counts, moves and seeds a batch after it has read it": [
        (_TrainingEpochLoop.advance, [
            "next(data_fetcher)", "convert_input(batch)", "increment_ready()",
            '"on_train_batch_start"',
        ]),
        (_FitLoop.advance, ["self.epoch_loop.run(self._data_fetcher)"]),
    ],
    "is through with an epoch when this method ends": [
        (_FitLoop.on_advance_end, [
            '"on_train_epoch_end"', "update_plateau_schedulers", "update_train_epoch_metrics()",
            "increment_completed()",
        ]),
        (_LoggerConnector.update_train_epoch_metrics, ['self.log_metrics(self.metrics["log"])']),
    ],
    "makes the iterator right after it has chosen a fetcher": [
        (_FitLoop.setup_data, [
            "self._load_combined_loader_states()\n\n        self._data_fetcher = ",
            "self._data_fetcher.setup(combined_loader)", "iter(self._data_fetcher)",
        ]),
        (_FitLoop, ["loader_states := self._combined_loader._state_dicts()"]),
        (_EvaluationLoop.reset, ["iter(data_fetcher)", "self._data_fetcher = data_fetcher"]),
    ],
    "reads one batch ahead where there is no length": [
        (fetchers._PrefetchDataFetcher.__iter__, ["for _ in range(self.prefetch_batches):"]),
        (fetchers._DataFetcher.__iter__, ["self.iterator = iter(self.combined_loader)"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", CANARIES)
def test_canary_lightning_still(what: str):
    check_sources(CANARIES[what])


@needs_locked_lightning
def test_canary_a_step_of_lightning_has_these_parts():
    """``EpochLoop`` does all of it; with another version every step is Lightning's own."""
    assert loops.knows_lightnings_step(), "read what has changed, then write STEP_DIGEST anew"


def test_an_unknown_lightning_trains_by_its_own_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(loops, "STEP_DIGEST", "of another version")
    loops.knows_lightnings_step.cache_clear()
    theirs, _ = run(Noted, False)
    ours, num_ordinary = run(Noted, True)
    loops.knows_lightnings_step.cache_clear()
    assert (theirs, num_ordinary) == (ours, 0)
    assert caplog.text.count("takes its steps in another way") == 1


def test_the_loop_keeps_the_name_that_checkpoints_have():
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[LeavesData(), LeavesObjects()],
    )
    before = trainer.fit_loop.state_dict()
    loops.install(trainer)
    assert isinstance(trainer.fit_loop.epoch_loop, loops.EpochLoop)
    assert trainer.fit_loop.state_dict() == before


class Blocks(Dataset[torch.Tensor]):
    """Blocks once, while it reads the tenth sample; its rank waits, and gets SIGTERM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 16

    def __getitem__(self, id: int) -> torch.Tensor:
        if id == 9 and (self.folder / "blocks").exists():
            (self.folder / "blocks").unlink()
            # Not getppid(): Python 3.14 starts loader processes by a server of its own.
            starter = multiprocessing.parent_process()
            rank = starter.pid if starter else os.getpid()
            until((self.folder / "waits").exists)
            os.kill(rank, signal.SIGTERM)
            threading.Event().wait(PATIENCE_S)
            (self.folder / "waited").touch()
        return torch.tensor([float(id)])


class BlocksInStream(IterableDataset[torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.samples = Blocks(folder)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(self.samples.__getitem__, range(16))


class OneByOne:
    """A loader that is none of torch's."""

    def __init__(self, folder: Path) -> None:
        self.samples = Blocks(folder)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.samples[id][None] for id in range(16))


BLOCKED: dict[str, Callable[[Path], Any]] = {
    "map-style": lambda folder: DataLoader(Blocks(folder), 4),
    "map-style, workers": lambda folder: DataLoader(Blocks(folder), 4, num_workers=1),
    "stream": lambda folder: DataLoader(BlocksInStream(folder), 4),
    "stream, workers": lambda folder: DataLoader(BlocksInStream(folder), 4, num_workers=1),
    "another loader": OneByOne,
    "BatchLoader": lambda folder: BatchLoader(
        Blocks(folder), 4, shuffle=False, collate_fn=default_collate
    ),
}


def with_worker(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.program) if "workers" in name else name


@pytest.mark.parametrize("name", [with_worker(name) for name in BLOCKED])
def test_a_signal_ends_the_wait_for_a_batch_of_any_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    interruptible = stopping.interruptible

    def tell(wait: Callable[[], Any]) -> Any:
        (tmp_path / "waits").touch()
        try:
            return wait()
        finally:
            (tmp_path / "waits").unlink()

    monkeypatch.setattr(stopping, "interruptible", lambda wait: interruptible(partial(tell, wait)))
    loader = partial(BLOCKED[name], tmp_path)
    fit(tmp_path / "whole", Net, loader)
    (tmp_path / "blocks").touch()
    parts = fit(tmp_path / "parts", Net, loader)
    assert len(parts) == 2
    assert not (tmp_path / "waited").exists()
    check_same(tmp_path / "parts", tmp_path / "whole")


class CountsReads(L.LightningDataModule):
    """Counts the batches that it gives, and says in its state how many these were."""

    def __init__(self) -> None:
        super().__init__()
        self.num_given = 0

    def train_dataloader(self) -> Any:
        return DataLoader([1.0] * 16, 4, collate_fn=self.collate)

    def collate(self, samples: list[float]) -> torch.Tensor:
        self.num_given += 1
        return torch.full((len(samples), 1), float(self.num_given))

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_given = state["num_given"]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_data_module_that_counts_what_it_reads_continues_exactly(tmp_path: Path, how: str):
    options: dict[str, Any] = {"save_every_s": 0} if how == "SIGKILL" else {}
    check_exact(tmp_path, Net, CountsReads, (0, 1), (1, 2), how=how, **options)
