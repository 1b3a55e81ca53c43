"""What is kept of each rank when an epoch is interrupted: buffers, sums, random numbers, order."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, IterableDataset

from library.tests.kit import Net, Normalized, batches, check_exact, check_same, fit
from samestep.callbacks.rank_state import RankState
from samestep.callbacks.rng import SeedSteps
from samestep.callbacks.run_state import Saved
from samestep.errors import ConfigError
from samestep.metrics import EpochMean
from samestep.ranks import environment


def test_buffers_and_sums_survive_an_interrupted_epoch(tmp_path: Path):
    """On two ranks: test_two_ranks.py."""
    whole, _ = check_exact(tmp_path, Normalized, batches, (0, 1), (1, 0), (1, 2))
    assert whole.module.body[1].running_mean.abs().sum() > 0


class Centred(Normalized):
    """Its validation changes a buffer, as a running mean that nobody freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.centre)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.centre += 0.1


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_the_sanity_check_changes_buffers_once(tmp_path: Path, how: str):
    options = {"num_sanity_val_steps": 2, "max_epochs": 3}
    check_exact(tmp_path, Centred, batches, (1, 1), how=how, **options)


def test_on_another_number_of_ranks_all_have_the_buffers_of_rank_zero():
    """A queue of samples beside their labels must not become the mean of two queues."""
    module = torch.nn.ModuleDict({"queue": torch.nn.Module(), "norm": torch.nn.BatchNorm1d(1)})
    module["queue"].register_buffer("labels", torch.zeros(2).long())
    saved = []
    for rank in (1, 3):
        buffers = {
            "queue.labels": torch.full((2,), rank),
            "norm.running_mean": torch.full((1,), float(rank)),
        }
        saved.append({"sums": {}, "buffers": buffers})
    ranks = RankState()
    trainer = L.Trainer(accelerator="cpu", logger=False)
    ranks.load(trainer, {}, Saved([saved[0]], [[state] for state in saved], is_same_number=False))
    ranks.begin(trainer, module)
    assert module["queue"].labels.tolist() == [1, 1]
    assert module["norm"].running_mean.item() == 1.0


@pytest.mark.parametrize(("is_rank_zero", "mean"), [(True, 2.0), (False, 0.0)])
def test_on_another_number_of_ranks_sums_are_counted_once(monkeypatch, is_rank_zero, mean: float):
    module, ranks = EpochMean("train", "loss"), RankState()
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    monkeypatch.setattr(environment, "rank", lambda: 0 if is_rank_zero else 2)
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.state.fn = "fit"
    saved = [{"sums": {"": torch.tensor([loss, 2.0], dtype=torch.float64)}} for loss in (3.0, 5.0)]
    ranks.load(trainer, {}, Saved([saved[0]], [[state] for state in saved], is_same_number=False))
    ranks.begin(trainer, module)
    assert module.mean_so_far("loss") == mean


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_a_step_gets_the_same_random_numbers_from_every_library():
    trainer = L.Trainer(accelerator="cpu", logger=False)

    def draw_in_batch(number: int) -> tuple[float, float, float]:
        SeedSteps(7).seed_step(trainer, number)
        return draw()

    first, other = draw_in_batch(3), draw_in_batch(4)
    assert draw_in_batch(3) == first
    assert not set(first) & set(other)


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


def test_the_generator_of_a_loader_continues_after_an_epoch(tmp_path: Path):
    """As after SIGKILL; and after SIGTERM, once the interrupted epoch is over."""
    (whole,) = fit(tmp_path / "whole", Net, own_generator)
    for epochs in (1, 2):
        fit(tmp_path / "longer", Net, own_generator, max_epochs=epochs)
    check_same(tmp_path / "longer", tmp_path / "whole")
    stopped = fit(tmp_path / "stopped", Net, own_generator, [(0, 1)])
    assert stopped[-1].seen[-4:] == whole.seen[-4:]


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_passes_that_a_data_set_counts_are_noticed(tmp_path: Path, capsys):
    fit(tmp_path, Net, lambda: DataLoader(Passes(), 2), [(1, 1)])
    said = capsys.readouterr().out
    assert "batch 2 of epoch 1 is another one" in said
    assert "training data 0.dataset.passes" in said


@pytest.mark.parametrize(("cut", "of_trainer"), [(3, 1), (2, {0: 2, 1: 3})])
def test_steps_that_are_cut_otherwise_than_accumulated_are_rejected(tmp_path, cut, of_trainer):
    def loader() -> Any:
        return batches(12, 6, drop_last=True, accumulate_grad_batches=cut)

    options: dict[str, Any] = {"accumulate_grad_batches": of_trainer}
    if isinstance(of_trainer, dict):
        options = {"callbacks": lambda: [GradientAccumulationScheduler(of_trainer)]}
    said = rf"accumulate_grad_batches={cut}\) must be that of the"
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, Net, loader, **options)
