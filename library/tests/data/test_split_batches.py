"""``split_batches``: ordinary DataLoaders give a step the same samples on any number of ranks."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, RandomSampler

from library.tests.kit import Net, batches, fit, on_ranks, rows, weights
from samestep.errors import ConfigError
from samestep.ranks import environment

pytestmark = pytest.mark.filterwarnings("ignore:Your .* sampler has shuffling enabled")


class Noisy(Dataset[torch.Tensor]):
    """A transform that draws from all three libraries; 13 samples."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(1) + float(np.random.rand()) + random.random()
        return index + 0.01 * noise


class Buckets:
    """A user's batch sampler: batches of different sizes, each drawn when it is read."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        for size in (5, 3, 4):
            yield random.sample(range(13), size)


def with_generator(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Noisy(), 4, sampler=RandomSampler(range(13), generator=generator))


def shuffled() -> DataLoader[Any]:
    return DataLoader(Noisy(), 4, shuffle=True)


LOADERS: dict[str, Any] = {
    # 13 samples: of the last batch three ranks cannot have one each.
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "buckets": lambda: DataLoader(Noisy(), batch_sampler=Buckets()),
}


class Data(L.LightningDataModule):
    """Loaders of one kind for training; validation and test have a batch for one rank only."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def train_dataloader(self) -> Any:
        return LOADERS[self.name]()

    def val_dataloader(self) -> Any:
        # Random, and the last batch has an odd number.
        return DataLoader(torch.arange(7.0)[:, None], 4, shuffle=True)

    test_dataloader = val_dataloader


def train_all(folder: str, place: list[int] | None) -> None:
    for name in LOADERS:
        train(Path(folder, name), name, place)


def train(run_dir: Path, name: str, place: list[int] | None) -> None:
    """Train three epochs, or up to a place; write what this rank has seen in each step."""
    data = iter([Data(name)] if place else [Data(name)] * 9)
    places = [(place[0], place[1])] if place else []
    parts = []
    with suppress(StopIteration):  # another number of ranks continues it
        parts += fit(
            run_dir, Net, lambda: next(data), places, max_epochs=3, save_every_s=1e-9,
            split_batches=True, callbacks=lambda: [Seen(run_dir)],
        )  # fmt: skip
    if parts:
        parts[-1].trainer.test(datamodule=Data(name), verbose=False)


class Seen(L.Callback):
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        ranks = f"{environment.rank()}of{environment.world_size()}"
        with (self.run_dir / f"seen-{ranks}.jsonl").open("a") as file:
            content = [trainer.current_epoch, batch_idx], batch.flatten().tolist()
            file.write(json.dumps(content) + "\n")


def seen(run_dir: Path) -> dict[tuple[int, int], set[float]]:
    """The samples of each step, of all ranks together."""
    found: dict[tuple[int, int], set[float]] = {}
    for path in run_dir.glob("seen-*"):
        for place, values in map(json.loads, path.read_text().splitlines()):
            found.setdefault(tuple(place), set()).update(values)
    return found


@pytest.mark.program
def test_steps_are_the_same_on_other_ranks_and_after_stops(tmp_path: Path):
    train_all(str(tmp_path / "whole"), None)
    for num, place in [(3, [0, 1]), (1, [1, 0]), (2, None)]:
        done = on_ranks(train_all, str(tmp_path / "parts"), place, num=num)
        assert done.returncode == 0, done.stdout + done.stderr
        stops = done.stdout.count("Stopped by SIGTERM")
        assert stops == (len(LOADERS) if place else 0)
        assert "ordinary DataLoader" not in done.stdout
        assert "this epoch began on" not in done.stdout
    for name in LOADERS:
        parts, whole = tmp_path / "parts" / name, tmp_path / "whole" / name
        assert seen(parts) == seen(whole)
        torch.testing.assert_close(weights(parts), weights(whole), rtol=1e-5, atol=1e-7)
        ours, theirs = (
            [float(row["val_loss"]) for row in rows(run) if row["val_loss"]]
            for run in (parts, whole)
        )
        assert ours == pytest.approx(theirs, rel=1e-4)
        # The test logs the same name.
        final = [json.loads((run / "metrics.json").read_text()) for run in (parts, whole)]
        assert final[0]["val_loss"] == pytest.approx(final[1]["val_loss"], rel=1e-4)


def draw_differently(folder: str) -> None:
    def make() -> DataLoader[Any]:
        return with_generator(environment.rank())

    fit(Path(folder) / "generator", Net, make, split_batches=True)


@pytest.mark.program
def test_ranks_that_draw_other_batches_are_told(tmp_path: Path):
    done = on_ranks(draw_differently, str(tmp_path))
    assert done.returncode == 2
    assert "the ranks have sampled different batches" in done.stderr
    assert done.stderr.count("error: ") == 1


def train_several(folder: str) -> None:
    for number, other in enumerate([shuffled, lambda: batches(15, 5)]):

        def make(other: Any = other) -> CombinedLoader:
            return CombinedLoader({"a": shuffled(), "b": other()}, "min_size")

        with pytest.raises(ConfigError, match=r"several .* need slices of equal length"):
            fit(Path(folder, str(number)), Net, make, split_batches=True)


@pytest.mark.program
def test_several_loaders_must_be_split_equally(tmp_path: Path):
    done = on_ranks(train_several, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_loader_is_as_it_was_after_training(tmp_path: Path):
    class Predicts(Net):
        def predict_step(self, batch, batch_idx):
            return batch

    loader = shuffled()
    batch_sampler = loader.batch_sampler
    (part,) = fit(tmp_path, Predicts, lambda: loader, split_batches=True)
    assert loader.batch_sampler is batch_sampler
    assert len(part.trainer.predict(part.module, loader)) == 4


@pytest.mark.program
def test_the_run_names_the_flag(tmp_path: Path):
    done = on_ranks(train_plainly, str(tmp_path))
    assert "batch_size counts samples per rank" in done.stdout
    assert "split_batches=True splits each batch" in done.stdout


def train_plainly(folder: str) -> None:
    fit(Path(folder), Net, shuffled, max_epochs=1)


def test_the_flag_makes_another_run(tmp_path: Path):
    fit(tmp_path, Net, shuffled, max_epochs=1)
    with pytest.raises(ConfigError, match=r"trainer\.split_batches: absent -> True"):
        fit(tmp_path, Net, shuffled, max_epochs=2, split_batches=True)
