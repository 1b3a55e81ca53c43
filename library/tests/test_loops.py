"""The loops against Lightning's own: the same hooks, logs, counters and weights."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops import fetchers
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
    _LoggerConnector,
)
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
)

from library.tests.canaries import Sources, check_sources
from library.tests.kit import LeavesData, LeavesObjects, Net, check_exact, check_same, fit
from library.tests.programs import PATIENCE_S, until
from samestep import BatchLoader, loops
from samestep.ranks import stopping

pytestmark = pytest.mark.filterwarnings("ignore")

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
