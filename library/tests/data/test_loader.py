"""Random transforms in a data set are the same on any number of ranks and loader processes."""

import random
from itertools import chain
from threading import Barrier, Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from library.tests.programs import PATIENCE_S
from samestep.data.loader import BatchLoader
from samestep.data.seeds import seed_all
from samestep.errors import ConfigError
from samestep.ranks import environment


def draw() -> list[float]:
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


class Photos(Dataset):
    """Answers one position at a time, and transforms the sample at random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        assert isinstance(index, int)
        return torch.tensor([float(index), *draw()], dtype=torch.float64)


class Noise(Photos):
    """Answers several positions at once, each batch with a noise of its own."""

    def __getitem__(self, index: Tensor) -> Tensor:
        return torch.tensor([[float(i), *draw()] for i in index], dtype=torch.float64)


def read(kind: type, epoch: int = 0, first: int = 0, **options) -> list[list[list[float]]]:
    if kind is Photos:
        options["collate_fn"] = default_collate
    loader = BatchLoader(kind(), 5, **{"shuffle": True} | options)
    loader.start_at(epoch, first)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", [Photos, Noise])
def test_transforms_depend_on_seed_and_epoch_only(kind: type):
    seed_all(1)
    expected = draw()
    seed_all(1)
    whole = read(kind)
    assert draw() == expected, "the numbers of a step are left alone"
    assert read(kind, first=1) == whole[1:]
    assert read(kind, num_workers=2) == whole
    assert read(kind, first=1, num_workers=1) == whole[1:]
    for other in (read(kind, epoch=1), read(kind, seed=1), read(kind, seed=1, num_workers=1)):
        numbers, others = (
            {number for batch in batches for sample in batch for number in sample[1:]}
            for batches in (whole, other)
        )
        assert len(numbers) == 36, "no two samples have the same numbers"
        assert not numbers & others


@pytest.mark.parametrize("num", [2, 7])
def test_a_sample_has_the_same_transform_on_each_rank(monkeypatch: pytest.MonkeyPatch, num: int):
    whole = read(Photos)
    ranks = []
    for rank in range(num):
        monkeypatch.setattr(environment, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(environment, "world_size", lambda: num)
        ranks.append(read(Photos))
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole


def test_an_error_of_a_data_set_that_answers_single_positions_names_the_argument():
    with pytest.raises(AssertionError):
        list(BatchLoader(Photos(), 4))

    class Lists(Photos):
        def __getitem__(self, index: int) -> str:
            return ["a", "b"][index]

    with pytest.raises((TypeError, ValueError)) as error:
        list(BatchLoader(Lists(), 4))
    assert "collate_fn=default_collate" in error.value.__notes__[0]


class Draws:
    """Counts what it gives, and draws from one source of random numbers."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.count = draw, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, ids: Tensor) -> Tensor:
        self.count += 1
        return ids + float(self.draw())


@pytest.mark.parametrize(
    ("draw", "draws"),
    [(lambda: torch.rand(()), True), (np.random.rand, True), (random.random, True), (int, False)],
)
def test_a_data_set_that_draws_for_whole_batches_is_recognized(draw: Any, draws: bool):
    data = Draws(draw)
    before = torch.get_rng_state(), random.getstate()
    assert BatchLoader(data, 2).draws_by_slice() == draws
    assert not BatchLoader(data, 2, collate_fn=torch.stack).draws_by_slice()
    assert data.count == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Waits(Dataset):
    """Remembers which reads were under way at once; the first ones wait for each other."""

    def __init__(self, at_once: int = 1, fails_at: int | None = None) -> None:
        self.fails_at, self.lock, self.first = fails_at, Lock(), Barrier(at_once)
        self.reading = self.most_at_once = self.most_ahead = self.num_read = 0
        self.used = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Tensor) -> Tensor:
        with self.lock:
            self.reading += 1
            self.num_read += 1
            # Before them the loader itself reads, to see whether the data set draws.
            is_first = 1 < self.num_read <= 1 + self.first.parties
            self.most_at_once = max(self.most_at_once, self.reading)
            self.most_ahead = max(self.most_ahead, self.num_read - self.used)
        if is_first:
            self.first.wait(PATIENCE_S)
        with self.lock:
            self.reading -= 1
        if self.fails_at in ids.tolist():
            raise OSError(f"sample {self.fails_at} cannot be read")
        return ids.clone()


def test_threads_read_ahead_in_the_same_order():
    data = Waits(at_once=3)
    expected = [ids.tolist() for ids in BatchLoader(Waits(), 4, shuffle=True, seed=2)]
    seed_all(1)
    numbers = draw()
    seed_all(1)
    loader = BatchLoader(data, 4, shuffle=True, seed=2, num_threads=3)
    found = []
    for ids in loader:
        data.used += 1
        found.append(ids.tolist())
    assert found == expected
    assert draw() == numbers, "the numbers of a step are left alone"
    assert data.most_at_once == 3
    assert data.most_ahead <= 2 * 3 + 1, "what is in memory is bounded"
    loader.start_at(0, 5)
    assert [ids.tolist() for ids in loader] == expected[5:]


def test_what_a_thread_cannot_read_is_raised_at_its_batch():
    loader = iter(BatchLoader(Waits(fails_at=9), 4, num_threads=2))
    assert [next(loader).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(OSError, match="sample 9 cannot be read"):
        next(loader)


def test_threads_and_random_numbers_do_not_go_together():
    with pytest.raises(ConfigError, match=r"num_threads=2: the data set draws random numbers"):
        list(BatchLoader(Draws(np.random.rand), 2, num_threads=2))
    with pytest.raises(ConfigError, match="num_threads=2, num_workers=1"):
        BatchLoader(Draws(int), 2, num_threads=2, num_workers=1)


class SaysNone(Draws):
    draws_random_numbers = False


def test_no_numbers_are_seeded_for_a_data_set_that_says_it_draws_none():
    batches = BatchLoader(SaysNone(int), 2)
    assert [ids.tolist() for ids in batches] == [[0, 1], [2, 3]]
    assert not batches.slices.are_seeded
    assert BatchLoader(Draws(int), 2).slices.are_seeded
    assert BatchLoader(SaysNone(int), 2, collate_fn=default_collate).slices.are_seeded


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.rand, random.random])
def test_a_data_set_that_draws_cannot_say_that_it_does_not(draw: Any):
    batches = BatchLoader(SaysNone(draw), 2)
    with pytest.raises(ConfigError, match=r"SaysNone.draws_random_numbers is False, but it draws"):
        next(iter(batches))
