"""Ranks for which the others wait, in real programs of two ranks."""

import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from library.tests.kit import Net, fit, on_ranks
from samestep import BatchLoader
from samestep.callbacks.slow_ranks import BLOCKS, DATA, FORWARD, find_slow
from samestep.ranks import environment
from samestep.run import record

SLEEP_S = 0.01
SLOW_S = 0.06
"""So much longer that a busy machine, which delays each rank now and then, does not hide it."""
NUM_STEPS = 100


class Samples(Dataset):
    """Numbers; rank 1 reads them slowly, if told to."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 4 * NUM_STEPS

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.is_slow and environment.rank() == 1:
            time.sleep(SLOW_S)
        return ids.float()[:, None]


class Sleeps(Net):
    """Spends time in its forward pass: rank 1 several times as much, if told to."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.is_slow = is_slow

    def training_step(self, batch, batch_idx):
        is_slow = self.is_slow and environment.rank() == 1
        time.sleep(SLOW_S if is_slow else SLEEP_S)
        return super().training_step(batch, batch_idx)


def train_three(folder: str) -> None:
    """One run whose rank 1 has slow data, one with a slow forward pass, and an even one."""
    for name in ("even", DATA, FORWARD):
        fit(
            Path(folder, name),
            lambda name=name: Sleeps(name == FORWARD),
            lambda name=name: BatchLoader(Samples(name == DATA), 4),
            max_epochs=1,
            log_every_n_steps=NUM_STEPS,
        )


@pytest.mark.program
def test_a_slow_rank_is_named_once_with_what_it_waits_for(tmp_path):
    done = on_ranks(train_three, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in (DATA, FORWARD):
        (slow,) = record.read(tmp_path / name).slow_ranks
        assert (slow["rank"], slow["cause"]) == (1, name)
        assert slow["step_s"] >= SLOW_S
        assert slow["step"] <= NUM_STEPS
    assert record.read(tmp_path / "even").slow_ranks == []
    assert done.stdout.count("Note: rank 1 is slow: it waits for its data for ") == 1
    assert done.stdout.count("Note: rank 1 is slow: it computes its forward pass for ") == 1
    assert done.stdout.count("is slow") == 2


def blocks(*forward: float) -> list[list[float]]:
    """Blocks of a rank with these seconds of forward passes, in which nothing waits for data."""
    return [[0.0, seconds, 10.0] for seconds in forward]


@pytest.mark.parametrize(
    ("of_ranks", "slow"),
    [
        ([blocks(*BLOCKS * [5.0]), blocks(*BLOCKS * [7.0])], [1]),
        ([blocks(*BLOCKS * [5.0]), blocks(*BLOCKS * [5.9])], []),
        # A single hiccup.
        ([blocks(*BLOCKS * [5.0]), blocks(5.0, 5.0, 90.0, 5.0, 5.0)], []),
        # Less than a millisecond of each step.
        ([[[0.0, 0.001, 0.02]] * BLOCKS, [[0.0, 0.005, 0.02]] * BLOCKS], []),
        # Twice as long, for which nobody waits in steps of a second.
        ([blocks(*BLOCKS * [0.1]), blocks(*BLOCKS * [0.2])], []),
        ([blocks(*BLOCKS * [seconds]) for seconds in (7.0, 5.0, 5.0, 7.0)], [0, 3]),
    ],
)
def test_noise_is_not_named(of_ranks, slow):
    assert [found.rank for found in find_slow(of_ranks)] == slow
