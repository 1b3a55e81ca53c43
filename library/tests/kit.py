"""A model, its data, and runs that are disturbed on purpose: all that tests of a run need.

``fit`` and ``check_exact`` train in this process, on each rank that there is. ``on_ranks`` calls a
function of a test module in new processes.
"""

import csv
import functools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from library.tests.programs import run_code
from samestep import BatchLoader, Trainer
from samestep.callbacks.data_resume import DataResume
from samestep.callbacks.objects import Objects
from samestep.callbacks.watchdog import Watchdog
from samestep.metrics import EpochMean
from samestep.plugins import preflight, provenance
from samestep.plugins import receipt_files as receipts
from samestep.ranks import stopping
from samestep.run.checkpoint import load
from samestep.run_spec import RunSpec

Place = tuple[int, int | str]
"""An epoch, and the batch after which a run is disturbed, or its ``start`` or ``validation``."""


class Net(L.LightningModule):
    """Learns from each batch, whatever its shape.

    Args:
        configure: its ``configure_optimizers``.
    """

    def __init__(self, configure: Callable[[L.LightningModule], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.configure = configure or (lambda module: torch.optim.Adam(module.parameters(), 0.01))

    def loss(self, batch: Any) -> Tensor:
        x = flat(batch)[:, None]
        return (self.head(self.body(x).tanh()) - 0.1 * x).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self):
        return self.configure(self)


class Scores(Net):
    """Logs these scores as ``val/score``, one for each validation."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch, batch_idx):
        self.log("val/score", self.scores[min(self.current_epoch, len(self.scores) - 1)])


class LeavesObjects(Objects):
    """Keeps nothing of what objects hold: a test counts in them what each start does."""

    def save(self, trainer: Any, checkpoint: Any) -> None:
        """Nothing."""


class Normalized(Net):
    """Has buffers, random numbers and sums that change in each step."""

    def __init__(self) -> None:
        super().__init__()
        parts = torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        self.body = torch.nn.Sequential(*parts)
        self.sums = EpochMean("train", "loss_of_all")

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.sums.update(len(batch[0]), loss_of_all=loss.detach() * len(batch[0]))
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.sums.means())


def flat(batch: Any) -> Tensor:
    """The numbers of a batch: a tensor, the first of a list, or those of each entry of a dict."""
    parts = list(batch.values()) if isinstance(batch, dict) else [batch]
    parts = [part for part in parts if part is not None]  # CombinedLoader of "max_size"
    parts = [part[0] if isinstance(part, (list, tuple)) else part for part in parts]
    return torch.cat([part.float().flatten() for part in parts])


def batches(num: int = 16, size: int = 4, **options: Any) -> BatchLoader:
    """A loader of the samples 0, 1, ... ``num - 1``; each epoch in another order."""
    data = TensorDataset(torch.arange(float(num))[:, None])
    return BatchLoader(data, size, **{"shuffle": True} | options)


class LeavesData(DataResume):
    """Leaves the training data to Lightning: a test compares with it, or needs no order."""

    def __init__(self) -> None:
        super().__init__(seed=0)

    def _place(self, trainer: L.Trainer) -> None:
        """Nothing: an epoch that continues begins again with its first batch."""

    def seed_order(self) -> None:
        """Nothing."""


class Clock:
    """Stands in for the module ``time`` in modules of the library: only a test moves it."""

    def __init__(self) -> None:
        self.now = float(round(time.time()))

    def read(self) -> float:
        return self.now

    monotonic = perf_counter = time = read

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Killed(BaseException):
    """Ends a run without a last word, as SIGKILL does.

    Not a KeyboardInterrupt: Lightning would ignore SIGINT from then on, and so would each program
    that a later test starts.
    """


class Observer(L.Callback):
    """Keeps on which batches this process has trained, and disturbs it once at each place.

    Args:
        left: the places to come; the next process of the run gets the same list.
        how: ``SIGTERM``; ``SIGKILL``, for which it raises ``Killed``; or ``both`` in turns.
        rank: which one is disturbed.
    """

    def __init__(self, left: list[Place], how: str = "SIGTERM", rank: int = 0) -> None:
        self.left, self.how, self.rank = left, how, rank
        self.seen: list[tuple[int, int, list[float]]] = []
        self.num_validations = 0
        self.module: Any = None
        self.trainer: Any = None

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        """Nothing: what it has seen is of this process."""

    def _disturb(self, trainer: L.Trainer, moment: int | str) -> None:
        if (place := (trainer.current_epoch, moment)) not in self.left:
            return
        self.left.remove(place)
        if self.how == "SIGKILL" or (self.how == "both" and len(self.left) % 2):
            raise Killed
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append((trainer.current_epoch, batch_idx, flat(batch).tolist()))
        self._disturb(trainer, batch_idx)

    def on_validation_start(self, trainer, pl_module) -> None:
        self._disturb(trainer, "validation")

    def on_validation_end(self, trainer, pl_module) -> None:
        self.num_validations += 1

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        self._disturb(trainer, "start")


find_packages = functools.cache(provenance.find_packages)
code_checksums = functools.cache(receipts.code_checksums)
hash_code_now = preflight.hash_code
hashes: dict[tuple[type, ...], dict[str, str]] = {}
"""A process of tests has imported hundreds of files, which stay as they are while it runs."""


def hash_code(*parts: object) -> dict[str, str]:
    """What ranks compare of their code depends on the classes of the parts alone."""
    kinds = tuple(type(part) for part in parts)
    if kinds not in hashes:
        hashes[kinds] = hash_code_now(*parts)
    return hashes[kinds]


def fit(
    run_dir: Path,
    model: Callable[[], L.LightningModule] = Net,
    data: Callable[[], Any] = batches,
    places: Sequence[Place] = (),
    *,
    how: str = "SIGTERM",
    rank: int = 0,
    callbacks: Callable[[], list[L.Callback]] = list,
    **options: Any,
) -> list[Observer]:
    """Train two epochs, and continue as often as the run was disturbed.

    Returns:
        What was observed by each process of the run, with its module and its Trainer.
    """
    left, parts = list(places), []
    default = {"max_epochs": 2, "logger": False, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    default |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    # Which steps a killed run repeats must not depend on how fast this machine is.
    default |= {"save_every_s": 300, "mode": "min"}
    while True:
        parts.append(observer := Observer(left, how, rank))
        # Nobody takes the power away from this machine, pytest keeps what is logged, and git is
        # asked by test_provenance.py.
        with (
            mock.patch.object(os, "fsync"),
            mock.patch("samestep.trainer.log_to_files"),
            mock.patch.object(provenance, "code_state", return_value=(None, "")),
            mock.patch.object(provenance, "find_packages", find_packages),
            mock.patch.object(receipts, "code_checksums", code_checksums),
            mock.patch.object(preflight, "hash_code", hash_code),
        ):
            trainer = Trainer(
                run_dir=run_dir, callbacks=[*callbacks(), observer], **default | options
            )
            observer.trainer, observer.module = trainer, model()
            loaders: Any = data()
            given = {"datamodule": loaders}
            if not isinstance(loaders, L.LightningDataModule):
                validates = observer.module.validation_step is not None
                val = batches(shuffle=False) if validates else None
                given = {"train_dataloaders": loaders, "val_dataloaders": val}
            try:
                trainer.fit(observer.module, **given)
                return parts
            except (stopping.Stopped, Killed):
                # A rank of torchrun ends after this, and cleans up nothing.
                stopping.uninstall()
                for callback in trainer.callbacks:
                    if isinstance(callback, Watchdog):
                        callback.stop()


def rows(run_dir: Path) -> list[dict[str, str]]:
    """The history of a run, without seconds, speeds and memory."""
    with (run_dir / "metrics.csv").open() as file:
        return [
            {
                name: value
                for name, value in row.items()
                if not name.startswith(("time/", "system/")) and not name.endswith("_per_second")
            }
            for row in csv.DictReader(file)
        ]


def weights(run_dir: Path, name: str = "last") -> dict[str, Tensor]:
    return load(run_dir / f"checkpoints/{name}.ckpt")["state_dict"]


def check_same(run_dir: Path, reference: Path) -> None:
    """Compare the final weights and the history of two runs, bit by bit."""
    torch.testing.assert_close(weights(run_dir), weights(reference), rtol=0, atol=0)
    assert rows(run_dir) == rows(reference)


def check_exact(
    tmp_path: Path,
    model: Callable[[], L.LightningModule] = Net,
    data: Callable[[], Any] = batches,
    *places: Place,
    **options: Any,
) -> tuple[Observer, list[Observer]]:
    """Compare a run that is disturbed at these places with one that is not."""
    (whole,) = fit(tmp_path / "whole", model, data, **options)
    parts = fit(tmp_path / "parts", model, data, places, **options)
    if whole.trainer.is_global_zero:  # which writes both
        check_same(tmp_path / "parts", tmp_path / "whole")
    assert len(parts) > 1
    state = whole.trainer.global_step, whole.trainer.current_epoch
    assert (parts[-1].trainer.global_step, parts[-1].trainer.current_epoch) == state
    ours, theirs = parts[-1].module.state_dict(), whole.module.state_dict()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    if "how" not in options:  # then no step was repeated
        assert [batch for part in parts for batch in part.seen] == whole.seen
        assert sum(part.num_validations for part in parts) == whole.num_validations
    return whole, parts


def make_spec(run_dir: Path, **facts: Any) -> RunSpec:
    """A run that nobody has begun."""
    return RunSpec(
        **{"run_id": "test", "run_dir": run_dir, "seed": 0, "accelerator": "cpu"} | facts
    )


RANK = "from {module} import {name} as function\nfunction(*{arguments!r})"


def on_ranks(function: Callable[..., object], *arguments: object, num: int = 2) -> CompletedProcess:
    """Call a function of a test module in ``num`` ranks; its arguments are plain values."""
    module, name = function.__module__, function.__name__
    code = RANK.format(module=module, name=name, arguments=arguments)
    return run_code(code, nodes=(num,))
