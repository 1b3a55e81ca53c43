"""What is kept of each rank when an epoch is interrupted: buffers, sums, random numbers, order."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from samestep.callbacks.checkpoints import LastCheckpoint, StopBetweenSteps
from samestep.callbacks.exact import (
    RankState,
    ResumeOrder,
    SeedSteps,
    float_buffers,
    seed_all,
    sums_of,
)
from samestep.callbacks.lost_state import LostState
from samestep.callbacks.sums import Sums
from samestep.data.loader import BatchLoader
from samestep.errors import ConfigError
from samestep.run.checkpoint import AtomicCheckpointIO
from tests.conftest import NO_PICTURES, QUICK, final_figures, run
from tests.samestep.callbacks import interrupted

# Batch norm keeps statistics of each rank's own images; dropout would hide nothing.
NORM = [
    *QUICK, NO_PICTURES, "model=resnet18", "model.net.width=2", "model/lr_scheduler=warmup_cosine",
    "trainer.limit_train_batches=6",
]  # fmt: skip


def train(tmp_path: Path, run_id: str, *overrides: str, fault: str = ""):
    node = "+callbacks.signaller"
    signaller = [f"{node}._target_=tests.signaller.Quiet", f"{node}.dirpath={tmp_path / run_id}"]
    return run(
        "train.py", *NORM, *overrides, *signaller, f"run_root={tmp_path / 'runs'}",
        RUN_ID=run_id, SIGNAL_AT=fault or "-1 0 0 rank",
    )  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_and_sums_of_each_rank_survive_an_interrupted_epoch(tmp_path: Path, devices: int):
    words = [f"trainer.devices={devices}"]
    assert train(tmp_path, "whole", *words).returncode == 0
    fault = f"9 {signal.SIGTERM:d} {devices - 1} rank"
    stopped = train(tmp_path, "stopped", *words, fault=fault)
    assert stopped.returncode == 143, stopped.stderr
    continued = train(tmp_path, "stopped", *words)
    assert continued.returncode == 0, continued.stderr
    for rank in range(devices):
        whole, ours = (
            torch.load(tmp_path / name / f"weights-{rank}.pt") for name in ("whole", "stopped")
        )
        assert all(torch.equal(whole[key], ours[key]) for key in whole)
    whole, stopped = (final_figures(tmp_path / "runs" / name) for name in ("whole", "stopped"))
    assert whole == stopped


def test_counters_and_empty_buffers_have_no_mean():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Sums("train", "loss"))
    assert [tuple(buffer.shape) for buffer in float_buffers(module).values()] == [(2,), (2,)]
    assert list(sums_of(module)) == ["1"]


def test_a_rank_with_more_samples_counts_more_in_the_mean_of_buffers():
    """When a run continues on another number of ranks, within an epoch."""
    module = torch.nn.BatchNorm1d(2)
    ranks = RankState()
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.state.fn = "fit"
    saved = [
        {"weight": weight, "sums": {}, "buffers": {"running_mean": torch.full((2,), value)}}
        for weight, value in ((0.5, 1.0), (1.5, 4.0))
    ]
    ranks.on_load_checkpoint(trainer, module, {"state_of_ranks": saved})
    ranks.on_train_start(trainer, module)
    assert module.running_mean.tolist() == [3.25, 3.25]


@pytest.mark.parametrize(("is_rank_zero", "mean"), [(True, 2.0), (False, 0.0)])
def test_on_another_number_of_ranks_sums_are_counted_once(monkeypatch, is_rank_zero, mean: float):
    module, ranks = Sums("train", "loss"), RankState()
    monkeypatch.setattr(L.Trainer, "world_size", 3)
    monkeypatch.setattr(L.Trainer, "is_global_zero", is_rank_zero)
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.state.fn = "fit"
    saved = [
        {"weight": 1.0, "sums": {"": torch.tensor([loss, 2.0], dtype=torch.float64)}}
        for loss in (3.0, 5.0)
    ]
    ranks.on_load_checkpoint(trainer, module, {"state_of_ranks": saved})
    ranks.on_train_start(trainer, module)
    assert module.mean_so_far("loss") == mean


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_a_step_gets_the_same_random_numbers_from_every_library():
    trainer = L.Trainer(accelerator="cpu", logger=False)

    def draw_in_batch(number: int) -> tuple[float, float, float]:
        SeedSteps(7).on_train_batch_start(trainer, L.LightningModule(), None, number)
        return draw()

    first, other = draw_in_batch(3), draw_in_batch(4)
    assert draw_in_batch(3) == first
    assert not set(first) & set(other)
    seed_all(5)
    first = draw()
    seed_all(5)
    assert draw() == first


class Interrupted(Exception):
    """Ends the training within an epoch, without a last word."""


class Reader(L.LightningModule):
    """Keeps which samples each batch had, and ends at one of them."""

    def __init__(self, end: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.end = end
        self.seen: list[tuple[int, list[list[float]]]] = []

    def training_step(self, batch, batch_idx):
        if (self.current_epoch, batch_idx) == self.end:
            raise Interrupted
        parts = batch.values() if isinstance(batch, dict) else [batch]
        samples = [x for part in parts for x in part]
        self.seen.append((self.current_epoch, [x.flatten().tolist() for x in samples]))
        return self.layer(samples[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def read(folder: Path, loaders, end: tuple[int, int] | None = None, ckpt: str | None = None):
    """What two epochs show to the model; every step is saved."""
    last = LastCheckpoint(str(folder), every_s=1e-9)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, plugins=[AtomicCheckpointIO()],
        callbacks=[StopBetweenSteps(last), ResumeOrder(0), last],
    )  # fmt: skip
    model = Reader(end)
    try:
        trainer.fit(model, loaders, ckpt_path=ckpt)
    except Interrupted:
        assert end is not None
    return model.seen


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("end", [(0, 1), (1, 4)])
def test_several_loaders_go_on_where_the_run_was_interrupted(tmp_path: Path, end, capsys):
    def loaders() -> dict[str, BatchLoader]:
        x = torch.arange(24.0)[:, None]
        sets = {"long": TensorDataset(x), "short": TensorDataset(-x[:8])}
        return {
            name: BatchLoader(part, 4, shuffle=True, seed=seed)
            for seed, (name, part) in enumerate(sets.items())
        }

    whole = read(tmp_path / "whole", loaders())
    epochs = [[batch for epoch, batch in whole if epoch == number] for number in (0, 1)]
    assert len(epochs[0]) == len(epochs[1]) == 6
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    begun = read(tmp_path / "run", loaders(), end)
    continued = read(tmp_path / "run", loaders(), ckpt=str(tmp_path / "run/last.ckpt"))
    assert begun + continued == whole
    assert "ordinary DataLoader" not in capsys.readouterr().out


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return iter([[torch.ones(1)]] * 4)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_of_a_stream_it_is_said_that_an_interrupted_epoch_begins_again(tmp_path: Path, capsys):
    stream = DataLoader(Stream(), batch_size=1)
    assert len(read(tmp_path, stream, (0, 3))) == 3
    assert len(read(tmp_path, stream, ckpt=str(tmp_path / "last.ckpt"))) == 4 + 4
    assert capsys.readouterr().out.count("it begins again with the first samples") == 2


class Passes(IterableDataset[Any]):
    """As litdata's: an order of its own for each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        self.passes += 1
        yield from torch.full((8, 1), float(self.passes))


def own_generator() -> Any:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(torch.arange(8.0)[:, None], 2, shuffle=True, generator=generator)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_the_generator_of_a_loader_continues_after_an_epoch(tmp_path: Path):
    """As after SIGKILL; and after SIGTERM, once the interrupted epoch is over."""
    (whole,) = interrupted.fit(tmp_path / "whole", own_generator)
    parts = [interrupted.fit(tmp_path / "parts", own_generator, max_epochs=n)[0] for n in (1, 2)]
    assert [batch for part in parts for batch in part.seen] == whole.seen
    stopped = interrupted.fit(tmp_path / "stopped", own_generator, [(0, 1)])
    assert stopped[-1].seen[-4:] == whole.seen[-4:]


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_passes_that_a_data_set_counts_are_named(tmp_path: Path, capsys):
    def lost() -> list[L.Callback]:
        return [LostState()]

    for epochs in (1, 2):
        interrupted.fit(
            tmp_path, lambda: DataLoader(Passes(), 2), callbacks=lost, max_epochs=epochs
        )
        said = capsys.readouterr().out
    assert "no checkpoint holds them: " in said
    assert "Passes.passes" in said


@pytest.mark.parametrize(("cut", "of_trainer"), [(3, 1), (2, 3), (2, {0: 2, 1: 3})])
def test_steps_that_are_cut_otherwise_than_accumulated_are_rejected(tmp_path, cut, of_trainer):
    def loader() -> BatchLoader:
        data = TensorDataset(torch.ones(12, 1))
        return BatchLoader(data, 6, drop_last=True, accumulate_grad_batches=cut)

    def scheduler() -> list[L.Callback]:
        return [GradientAccumulationScheduler(of_trainer)]

    options: dict[str, Any] = {"accumulate_grad_batches": of_trainer}
    if isinstance(of_trainer, dict):
        options = {"callbacks": scheduler}
    with pytest.raises(
        ConfigError,
        match=rf"accumulate_grad_batches={cut}\) must be that of the",
    ):
        interrupted.fit(tmp_path, loader, **options)
