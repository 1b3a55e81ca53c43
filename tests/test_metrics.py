"""Metrics of modules in other people's style: nothing of Samestep, no ``sync_dist``."""

import csv
import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from samestep.data.loader import BatchLoader
from tests.conftest import final_metrics, run, run_ranks


class Data(L.LightningDataModule):
    """Samples in order of their size, so that no rank's share looks like the whole."""

    def __init__(self, global_batch_size: int, seed: int):
        super().__init__()
        self.seed = seed

    def setup(self, stage: str):
        x = torch.linspace(0, 3, 71)[:, None]
        self.data = TensorDataset(x, x.sin())

    def train_dataloader(self):
        return BatchLoader(self.data, 20, shuffle=True, drop_last=True, seed=self.seed)

    def val_dataloader(self):
        # Slices of 11 and 10 samples, and of 4 and 4.
        return BatchLoader(self.data, 21)

    def test_dataloader(self):
        return DataLoader(TensorDataset(*self.data[:70]), batch_size=16)


class Plain(L.LightningModule):
    """Logs as Lightning's own examples do."""

    def __init__(self, hidden_size: int, lr: float):
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


def command(model: type[L.LightningModule], root: Path, *overrides: str) -> list[str]:
    return [
        "train.py", "data=skeleton", f"data._target_={__name__}.Data", "model=skeleton",
        f"model._target_={__name__}.{model.__name__}", "callbacks.checkpoints.monitor=val_loss",
        "callbacks.checkpoints.mode=min", "trainer.max_epochs=2", "trainer.accelerator=cpu",
        "report=false", f"run_root={root}", *overrides,
    ]  # fmt: skip


Evaluate = Callable[..., dict[str, float]]


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """The metrics that ``samestep evaluate`` prints for a run."""
    # The processes that train import this file, and find no scripts.
    from samestep.evaluate import main

    def evaluate(run_dir: Path, *words: str) -> dict[str, float]:
        capsys.readouterr()
        assert main([str(run_dir), "--format", "json", "--trust", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return evaluate


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run on two ranks."""
    root = tmp_path_factory.mktemp("metrics")
    watch = f"+callbacks.watch._target_={__name__}.Monitored"
    result = run_ranks(*command(Plain, root, watch), RUN_ID="two")
    assert result.returncode == 0, result.stderr
    assert "sync_dist" not in result.stderr
    return root / "two"


def test_metrics_of_two_ranks_are_those_of_all_samples(two_ranks: Path, evaluated: Evaluate):
    metrics = final_metrics(two_ranks)
    for split, ckpt in (("val", "last"), ("test", "best")):
        whole = evaluated(two_ranks, "--split", split, "--ckpt", ckpt)
        for name in ("loss", "count", "max", "min"):
            name = f"{split}_{name}"
            assert metrics[name] == pytest.approx(whole[name], abs=1e-6), name
    assert metrics["test/acc"] == pytest.approx(whole["test/acc"], abs=1e-6)
    assert (metrics["val_count"], metrics["test_count"]) == (71, 70)
    assert (metrics["of_rank_zero"], metrics["of_the_end"], metrics["gathered"]) == (5, 0.5, 3)
    assert metrics["late"] == 0.5


def test_every_rank_monitors_the_same_value(two_ranks: Path):
    first, second = ((two_ranks / f"monitored-{rank}.txt").read_text() for rank in (0, 1))
    assert "of_rank_zero=5.0" in first
    assert first == second


def test_metrics_of_two_ranks_survive_an_interruption(two_ranks: Path, tmp_path: Path):
    watch = "+callbacks.signaller"
    words = [
        *command(Plain, tmp_path),
        f"{watch}._target_=tests.signaller.Quiet", f"{watch}.dirpath={tmp_path / 'seen'}",
    ]  # fmt: skip
    for fault, code in ((f"4 {signal.SIGTERM:d} 1 rank", 143), ("-1 0 0 rank", 0)):
        result = run_ranks(*words, RUN_ID="stopped", SIGNAL_AT=fault)
        assert result.returncode == code, result.stderr
    assert final_metrics(tmp_path / "stopped") == final_metrics(two_ranks)


class Noisy(Plain):
    """Draws random numbers in every step, and shows images, as a VAE or a GAN does."""

    def losses(self, batch: list[Tensor]) -> Tensor:
        noise = torch.randn(1) + random.random() + np.random.rand()
        return super().losses(batch) * (1 + noise.square())

    def training_step(self, batch, batch_idx):
        tracker = self.logger.experiment
        tracker.add_image("samples", torch.zeros(1, 2, 2), self.global_step)
        if type(self.logger).__name__ == "NullLogger":
            with tracker.train() as stage:
                stage.config["lr"] = stage.config.update({"lr": 1}, allow_val_change=True)
            assert not list(tracker.images)
            self.logger.log_image(key="samples", images=[])
            tracker.log({"x": 1})
        assert Path(self.logger.log_dir).is_dir()
        assert self.trainer.log_dir == self.logger.log_dir
        assert len(self.loggers) == 2
        return super().training_step(batch, batch_idx)

    def on_test_epoch_start(self):
        self.start = torch.rand(1)

    def on_test_epoch_end(self):
        self.log("test_drawn", self.start + torch.rand(1))


def test_random_figures_are_repeated_by_evaluate_and_after_an_interruption(
    tmp_path: Path, evaluated: Evaluate
):
    """On the way, a module has the chosen tracker, or one that does nothing."""
    metrics, rows = [], []
    for name, *overrides in (["whole", "logger=tensorboard"], ["stopped"]):
        watch = "+callbacks.signaller"
        words = [
            *command(Noisy, tmp_path, *overrides),
            f"{watch}._target_=tests.signaller.Quiet", f"{watch}.dirpath={tmp_path / 'seen'}",
        ]  # fmt: skip
        faults = [(f"4 {signal.SIGTERM:d} 0 rank", 143)] if name == "stopped" else []
        for fault, code in [*faults, ("-1 0 0 rank", 0)]:
            result = run(*words, RUN_ID=name, SIGNAL_AT=fault)
            assert result.returncode == code, result.stderr
        metrics.append(final_metrics(tmp_path / name))
        with (tmp_path / name / "metrics.csv").open() as file:
            rows.append(
                [{k: v for k, v in row.items() if "_per_" not in k} for row in csv.DictReader(file)]
            )
    assert metrics[0] == metrics[1]
    assert [row["step"] for row in rows[0]] == ["2", "5", "6"]
    for split, ckpt in (("test", "best"), ("val", "last")):
        again = evaluated(tmp_path / "whole", "--split", split, "--ckpt", ckpt)
        # What is logged with logger=False is in no record of validation.
        again = {name: value for name, value in again.items() if name != "val/acc"}
        assert again == {name: value for name, value in metrics[0].items() if name in again}
