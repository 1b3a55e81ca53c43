"""Modules that log in other people's style, without ``sync_dist``: two ranks have one's metrics."""

import json
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

from library.tests.kit import Net, batches, check_exact, fit, flat, on_ranks, weights
from samestep.data.loader import BatchLoader
from samestep.ranks import environment


class Data(L.LightningDataModule):
    """Samples in order of their size, so that no rank's slices look like the whole."""

    def __init__(self, global_batch_size: int = 20, seed: int = 0):
        super().__init__()
        self.global_batch_size = global_batch_size
        self.seed = seed

    def setup(self, stage: str):
        x = torch.linspace(0, 3, 71)[:, None]
        self.data = TensorDataset(x, x.sin())

    def train_dataloader(self):
        size, seed = self.global_batch_size, self.seed
        return BatchLoader(self.data, size, shuffle=True, drop_last=True, seed=seed)

    def val_dataloader(self):
        # Slices of 11 and 10 samples, and of 4 and 4.
        return BatchLoader(self.data, 21)

    def test_dataloader(self):
        return DataLoader(TensorDataset(*self.data[:70]), batch_size=16)


class Plain(L.LightningModule):
    """Logs as Lightning's own examples do."""

    def __init__(self, hidden_size: int = 8, lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(1, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1))
        self.train_error = MeanSquaredError()

    def losses(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square()

    def training_step(self, batch, batch_idx):
        loss = self.losses(batch).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.train_error(self.net(batch[0]), batch[1])
        self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def evaluation_step(self, batch, stage):
        losses = self.losses(batch)
        self.log(f"{stage}_loss", losses.mean(), on_step=stage == "test", on_epoch=True)
        self.log(f"{stage}/acc", (losses < 0.1).float().mean(), prog_bar=True, logger=False)
        self.log(f"{stage}_count", float(len(losses)), reduce_fx="sum")
        self.log(f"{stage}_max", losses.max(), reduce_fx="max")
        self.log(f"{stage}_min", losses.min(), reduce_fx=min)
        self.logger.experiment.add_scalar(f"{stage}_by_hand", losses.mean(), self.global_step)

    def validation_step(self, batch, batch_idx):
        self.evaluation_step(batch, "val")
        if self.global_rank == 0:
            self.log("of_rank_zero", 5)

    def on_validation_epoch_end(self):
        self.log("of_the_end", float(self.global_rank))
        self.log("gathered", self.all_gather(torch.tensor(self.global_rank + 1.0)).sum())

    def test_step(self, batch, batch_idx):
        self.evaluation_step(batch, "test")

    def on_train_epoch_end(self):
        self.log("late", float(self.global_rank))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        # Only rank zero logs it, so that on the other ranks Lightning alone would not find it.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "of_rank_zero"},
        }


class Monitored(L.Callback):
    """Writes down what callbacks read, on each rank."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note(trainer, "val_loss", "of_the_end")

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note(trainer, "train_loss_epoch", "late", "of_rank_zero", "val_loss")

    def note(self, trainer: L.Trainer, *names: str) -> None:
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        values = [f"{name}={trainer.callback_metrics[name]}" for name in names]
        path = Path(trainer.default_root_dir, f"monitored-{trainer.global_rank}.txt")
        with path.open("a") as file:
            file.write(f"{lr} {values}\n")


def train_on_ranks(folder: str) -> None:
    """A run that is left alone, and one that rank 1 stops in its second epoch."""
    options: dict[str, Any] = {
        "monitor": "val_loss",
        "mode": "min",
        "callbacks": lambda: [Monitored()],
    }
    whole, parts = check_exact(Path(folder), Plain, Data, (1, 0), rank=1, **options)
    for part in (whole, parts[-1]):
        part.trainer.test(datamodule=Data(), verbose=False)


def final_metrics(run_dir: Path) -> dict[str, float]:
    metrics = json.loads((run_dir / "metrics.json").read_text())
    return {name: v for name, v in metrics.items() if not name.startswith(("time/", "system/"))}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs ``whole`` and ``parts`` on two ranks."""
    root = tmp_path_factory.mktemp("metrics")
    done = on_ranks(train_on_ranks, str(root))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sync_dist" not in done.stderr
    return root


@pytest.mark.program
def test_metrics_of_two_ranks_are_those_of_all_samples(two_ranks: Path):
    metrics = final_metrics(two_ranks / "whole")
    for stage, checkpoint, num in (("val", "last", 71), ("test", "best", 70)):
        module, data = Plain(), Data()
        module.load_state_dict(weights(two_ranks / "whole", checkpoint))
        data.setup("fit")
        with torch.no_grad():
            losses = module.losses(data.data[:num])
        expected = {"loss": losses.mean(), "count": num, "max": losses.max(), "min": losses.min()}
        for name, value in expected.items():
            assert metrics[f"{stage}_{name}"] == pytest.approx(float(value), abs=1e-6), name
    assert metrics["test/acc"] == pytest.approx(float((losses < 0.1).float().mean()), abs=1e-6)
    assert (metrics["of_rank_zero"], metrics["of_the_end"], metrics["gathered"]) == (5, 0.5, 3)
    assert metrics["late"] == 0.5


@pytest.mark.program
def test_every_rank_monitors_the_same_value(two_ranks: Path):
    first, second = ((two_ranks / f"whole/monitored-{n}.txt").read_text() for n in (0, 1))
    assert "of_rank_zero=5.0" in first
    assert first == second


@pytest.mark.program
def test_metrics_of_two_ranks_survive_an_interruption(two_ranks: Path):
    assert final_metrics(two_ranks / "parts") == final_metrics(two_ranks / "whole")


class Sometimes(Net):
    """Logs nothing in every other step, in which Lightning logs the last value again."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            self.log("train_loss", loss)
            self.log("both", loss, on_step=True, on_epoch=True)
        return loss


def test_a_step_that_logs_nothing_repeats_the_last_value(tmp_path: Path):
    check_exact(tmp_path, Sometimes, batches, (0, 0), (1, 2))


class Objects(Net):
    """Logs what Lightning reduces when it is first read: torchmetrics objects and ``sync_dist``."""

    def __init__(self) -> None:
        super().__init__()
        self.train_mean, self.late_mean, self.rank_mean = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_means = MetricCollection({"val_mean": MeanMetric(), "val_again": MeanMetric()})

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        x = flat(batch)
        self.train_mean(x)
        self.late_mean.update(x)
        self.log("train_mean", self.train_mean, on_step=True, on_epoch=True, prog_bar=True)
        for reduction in ("mean", "sum", "max", "min"):
            value = getattr(x, reduction)()
            options: Any = {"reduce_fx": reduction, "on_step": False, "on_epoch": True}
            self.log(reduction, value, prog_bar=True, **options)
            self.log(f"synced_{reduction}", value, sync_dist=True, prog_bar=True, **options)
        # A metric of one rank only, of which the other one must know.
        if self.global_rank == self.trainer.world_size - 1:
            self.rank_mean(x.mean())
            self.log("rank_mean", self.rank_mean, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.log("late_mean", self.late_mean, prog_bar=True)
        self.train_mean.reset()  # its value is known by now

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.val_means.update(flat(batch))
        self.log_dict(self.val_means, prog_bar=True)
        self.log("val_synced", flat(batch).mean(), sync_dist=True, prog_bar=True)


class ReadsOnRankZero(L.Callback):
    """Reads all metrics wherever it can, as a progress bar does."""

    def __init__(self) -> None:
        self.read: dict[str, float] = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.is_global_zero:
            for name in ("progress_bar_metrics", "logged_metrics", "callback_metrics"):
                for metric, value in getattr(trainer, name).items():
                    self.read[metric] = float(value)

    on_train_epoch_start = on_train_epoch_end = on_train_end = on_train_batch_end
    on_validation_start = on_validation_epoch_end = on_validation_end = on_train_batch_end
    on_validation_batch_end = on_sanity_check_end = on_train_batch_end


def read_on_rank_zero(folder: str) -> dict[str, float]:
    reads = ReadsOnRankZero()
    options: dict[str, Any] = {"enable_progress_bar": True, "num_sanity_val_steps": 2}
    root = Path(folder)
    fit(root / "run", Objects, callbacks=lambda: [reads], timeout_s=100.0, **options)
    if environment.world_size() > 1 and environment.rank() == 0:
        (root / "read.json").write_text(json.dumps(reads.read))
    return reads.read


@pytest.mark.program
def test_metrics_are_read_on_rank_zero_only(tmp_path: Path):
    done = on_ranks(read_on_rank_zero, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "read.json").read_text())
    alone = read_on_rank_zero(str(tmp_path / "alone"))
    # Rank zero has its own value of a step, and the other rank logs this one for its slices.
    for name in ("train_loss", "train_mean_step", "train_mean", "rank_mean"):
        assert name in read
        read.pop(name), alone.pop(name)
    # Each of the two slices of the four batches adds its own to a sum.
    assert read.pop("sum") == read.pop("synced_sum") == alone.pop("sum") == alone.pop("synced_sum")
    assert read == pytest.approx(alone, rel=1e-5)


class Repeats(Net):
    """Logs means with the same arguments in each step, and a mean of single steps."""

    found: ClassVar[list[list[float]]] = []
    validation_step = None

    def training_step(self, batch, batch_idx):
        means = {"largest": batch[0].max(), "mean": batch[0].mean()}
        self.log_dict(means, on_step=False, on_epoch=True)
        self.log("other_loss", batch[0].mean())
        return self.loss(batch)

    def on_train_epoch_end(self):
        found = self.trainer.callback_metrics
        self.found.append([float(found[name]) for name in ("largest", "mean", "other_loss_epoch")])


def test_lightning_checks_a_mean_of_the_training_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each epoch has the mean over its 71 samples, though its last batch is shorter."""
    checked: list[str] = []
    log = _ResultCollection.log

    def checking(results: Any, fx: str, name: str, *args: Any, **options: Any) -> None:
        checked.append(name)
        log(results, fx, name, *args, **options)

    monkeypatch.setattr(_ResultCollection, "log", checking)
    x = torch.linspace(0, 3, 71)[:, None]
    fit(tmp_path, Repeats, lambda: DataLoader(TensorDataset(x), 4))
    largest = sum(part.max() * len(part) for part in x.split(4)) / 71
    expected = [float(largest), 1.5, 1.5]
    assert Repeats.found == [pytest.approx(expected), pytest.approx(expected)]
    assert checked.count("other_loss") == 2 * 18
    assert checked.count("mean") == checked.count("largest") == 2
