"""State in Python of data sets and loaders, in this process and in loader processes."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

from library.tests.kit import Net, fit
from samestep import BatchLoader
from samestep.callbacks.loader_state import (
    WatchedCollate,
    changed_in_processes,
    encode_data,
    has_changed,
    unwatch,
    watch,
)


class Jitter:
    """A transform with random numbers of its own, as libraries of transforms have them."""

    def __init__(self) -> None:
        self.dice = random.Random(0)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.dice.random()


JITTER = Jitter()


class Samples(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Draws(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(super().__getitem__(index))


class Counts(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return super().__getitem__(index)


class Makes(Samples):
    """Makes its generator where it is needed first, because processes must not share one."""

    rng = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(index)
        return super().__getitem__(index) + self.rng.random()


class Caches(Samples):
    """All the ways to keep what was read, and nothing that changes a sample."""

    def __init__(self) -> None:
        self.cache: dict[int, torch.Tensor] = {}
        self.items: list[torch.Tensor | None] = [None] * 12
        self.file: Any = None
        self.last_path = ""

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = list(torch.arange(12.0)[:, None])
            self.mean = 5.5
        self.last_path = f"{index}.jpg"
        self.items[index] = self.file[index]
        return self.cache.setdefault(index, self.file[index])


class Stream(IterableDataset[Any]):
    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter(torch.ones(12, 1))


def draw(samples: list[Any], rng: np.random.Generator) -> torch.Tensor:
    return default_collate(samples) + rng.random()


def seed_process(worker_id: int) -> None:
    torch.utils.data.get_worker_info().dataset.count = 10 * worker_id


CASES: list[tuple[Any, dict[str, Any], set[str]]] = [
    (Draws(transform=Jitter()), {}, {"Draws.transform"}),
    (Draws(transform=lambda value, jitter=JITTER: jitter(value)), {}, {"Draws.transform"}),
    (Counts(count=0), {"worker_init_fn": seed_process}, {"Counts.count"}),
    (Makes(), {}, {"Makes.rng"}),
    (Subset(ConcatDataset([Counts(count=0), Samples()]), range(24)), {}, {"Counts.count"}),
    (Samples(), {"collate_fn": partial(draw, rng=np.random.default_rng(0))}, {"collate_fn"}),
    (Caches(), {}, set()),
    # New processes read an interrupted epoch again, and count the same.
    (Stream(), {}, set()),
    (Stream(), {"persistent_workers": True}, {"Stream.passes"}),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "options", "names"), CASES)
def test_what_changes_in_a_loader_process_is_named(dataset, options, names: set[str]):
    loader = DataLoader(dataset, batch_size=2, num_workers=2, **options)
    watch([loader])
    for _ in range(2):
        list(loader)
    assert changed_in_processes([loader]) == names


@pytest.mark.parametrize("dataset", [Caches(), Counts(count=0)])
def test_it_is_named_alike_without_processes(tmp_path: Path, dataset, capsys):
    fit(tmp_path, Net, lambda: DataLoader(dataset, batch_size=4))
    said = capsys.readouterr().out
    assert ("no checkpoint holds them: Counts.count" in said) == isinstance(dataset, Counts)
    assert "Caches" not in said


@pytest.mark.program
def test_other_starts_of_processes_and_batch_loaders():
    spawned = DataLoader(
        Counts(count=0), batch_size=2, num_workers=1, multiprocessing_context="spawn"
    )
    batched = BatchLoader(Counts(count=0), 2, num_workers=1, collate_fn=default_collate)
    for loader in (spawned, batched):
        watch([loader])
        list(loader)
        assert changed_in_processes([loader]) == {"Counts.count"}


class Padding:
    def __init__(self) -> None:
        self.padding = 3

    def __call__(self, samples: list[Any]) -> Any:
        return default_collate(samples)


def test_a_run_names_it_and_leaves_the_loader_as_it_was(tmp_path: Path, capsys):
    collate = Padding()
    loader = DataLoader(Counts(count=0), batch_size=4, num_workers=1, collate_fn=collate)
    seen = []

    class Reads(Net):
        def training_step(self, batch, batch_idx):
            seen.append((type(loader.collate_fn), loader.collate_fn.padding))
            return super().training_step(batch, batch_idx)

    fit(tmp_path, Reads, lambda: loader, [(0, 1)])
    said = capsys.readouterr().out
    assert said.count("no checkpoint holds them: Counts.count") == 2
    assert set(seen) == {(WatchedCollate, 3)}
    assert loader.collate_fn is collate
    # Lightning's own.
    assert isinstance(loader.worker_init_fn, partial)
    unwatch(loader)
    assert loader.collate_fn is collate


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (1, 2, True), (1, 1, False), (float("nan"), float("nan"), False), ("a", "b", False),
        (None, 3, False), ([1], [1, 2], True), ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"a": 2}, True), ({"a": 1}, {}, False), ([None], [1.0], False),
        ({1}, {1, 2}, True), (torch.ones(2), torch.zeros(2), True), (0, None, False),
        ([0] * 2000, [0] * 2001, True), ((1, {"a": [0]}), (1, {"a": [3]}), True),
    ],
)  # fmt: skip
def test_what_a_cache_gains_is_no_state(before: Any, now: Any, expected: bool):
    assert has_changed(encode_data(before), encode_data(now)) == expected
