"""Batches that a DataModule divides by the number of ranks, and that are split once more."""

import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from library.tests.kit import Net, batches, fit, on_ranks
from samestep import BatchLoader
from samestep.errors import ConfigError

DATA = TensorDataset(torch.arange(64.0)[:, None])


class Divides(L.LightningDataModule):
    """As in the leading template of Lightning and Hydra."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size_per_device = batch_size

    def setup(self, stage: str) -> None:
        if self.hparams.batch_size % self.trainer.world_size:
            raise RuntimeError("batch_size must divide by the devices")
        self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.batch_size_per_device, shuffle=True)


class Exact(Divides):
    def train_dataloader(self) -> Any:
        return BatchLoader(DATA, self.batch_size_per_device)


class ByVariable(Divides):
    """By a number of ranks from elsewhere."""

    def setup(self, stage: str) -> None:
        self.size = self.hparams.batch_size // int(os.environ["WORLD_SIZE"])

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.size)


class Whole(L.LightningDataModule):
    """Uses the number of ranks for something else."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.num_threads = 8 // self.trainer.world_size
        assert self.num_threads == self.hparams.batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.hparams.batch_size)


class OwnSampler(Divides):
    """Splits the data itself, so nothing is divided twice."""

    def train_dataloader(self) -> Any:
        sampler = DistributedSampler(DATA, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(DATA, batch_size=self.batch_size_per_device, sampler=sampler)


TWICE = {Divides: "split_batches=True", Exact: "BatchLoader", ByVariable: "split_batches=True"}


def train_each(folder: str) -> None:
    """On each of two ranks."""
    for data, divides in TWICE.items():
        run_dir = Path(folder, data.__name__)
        said = f"the data divide batch_size=16 by 2 ranks to batch_size=8, and {divides} divides"
        with pytest.raises(ConfigError) as caught:
            fit(run_dir, Net, data, split_batches=data is not Exact, max_epochs=1)
        assert str(caught.value).startswith(said), str(caught.value)
        assert not list(run_dir.glob("checkpoints/*"))
    for data in (Whole, OwnSampler):
        fit(Path(folder, data.__name__), Net, data, split_batches=True, max_epochs=1)


class Stream(IterableDataset):
    """Eight batches of numbers; with ``splits`` each rank has its own."""

    def __init__(self, splits: bool) -> None:
        self.splits = splits

    def __iter__(self) -> Any:
        rank = dist.get_rank() if self.splits else 0
        return iter(torch.arange(32.0)[rank :: 1 + self.splits, None])


def train_on_streams(folder: str) -> None:
    for splits in (False, True):
        out = StringIO()
        with redirect_stdout(out):
            data = DataLoader(Stream(splits), batch_size=4)
            (seen,) = fit(Path(folder, str(splits)), Net, lambda data=data: data, max_epochs=1)
        is_noted = "Note: all 2 ranks have read the same first batch of a stream" in out.getvalue()
        assert is_noted == (not splits and seen.trainer.is_global_zero), out.getvalue()


@pytest.mark.program
@pytest.mark.filterwarnings("ignore")
def test_a_stream_that_every_rank_reads_whole_is_named(tmp_path: Path):
    done = on_ranks(train_on_streams, str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.program
@pytest.mark.filterwarnings("ignore")
def test_batches_that_are_divided_twice_are_found_before_the_first_step(tmp_path: Path):
    done = on_ranks(train_each, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_one_rank_divides_nothing(tmp_path: Path):
    (seen,) = fit(tmp_path, Net, lambda: batches(64, 16), split_batches=True, max_epochs=1)
    assert seen.trainer.global_step == 4
