"""Means of an epoch that was interrupted: of ``self.log`` and of torchmetrics."""

from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import TensorDataset
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from samestep.callbacks.checkpoints import LastCheckpoint, StopBetweenSteps
from samestep.callbacks.exact import RankState, ResumeOrder
from samestep.data.loader import BatchLoader
from samestep.ranks import lightning_patches
from samestep.run.checkpoint import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before",
    "ignore:.*`cat` reduction.*:UserWarning",
)


class Interrupted(Exception):
    """Ends the training within an epoch, without a last word."""


class Logs(L.LightningModule):
    """Logs in every style, and ends at some batches of its second epoch."""

    def __init__(self, *ends: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.mean_error = MeanSquaredError()
        self.both = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.seen = CatMetric()
        self.ends = ends
        self.epochs: list[dict[str, float]] = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if self.current_epoch == 1 and batch_idx in self.ends:
            raise Interrupted
        loss = self.layer(x).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"most": x.max(), "number": batch_idx}, on_epoch=True, reduce_fx="max")
        self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        if batch_idx == 0:
            self.log("of_the_first", loss, on_step=False, on_epoch=True)
        self.mean_error(x, torch.ones_like(x))
        self.log("mean_error", self.mean_error, on_step=False, on_epoch=True)
        self.both.update(x[:, 0] % 1, x[:, 0] > 10)
        self.seen.update(x)
        return loss

    def on_train_batch_end(self, *args):
        self.log("late", self.layer.weight.detach().square().sum(), on_epoch=True)

    def on_train_epoch_end(self):
        self.log_dict(self.both.compute())
        self.log("seen", self.seen.compute().sum())
        self.both.reset()
        self.seen.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Seen(L.Callback):
    def __init__(self, epochs: list[dict[str, float]]) -> None:
        self.epochs = epochs

    def on_train_epoch_start(self, trainer: L.Trainer, *_: object) -> None:
        self.on_train_end(trainer)

    def on_train_end(self, trainer: L.Trainer, *_: object) -> None:
        self.epochs.append({name: v.item() for name, v in trainer.callback_metrics.items()})


def train(folder: Path, *ends: int, is_kept: bool = True) -> dict[str, float]:
    """The figures of the second of two epochs of seven batches, interrupted at ``ends``."""
    epochs: list[dict[str, float]] = []
    x = torch.linspace(0, 20, 27)[:, None]
    for start in range(len(ends) + 1):
        lightning_patches.reduce_logs_over_ranks()
        last = LastCheckpoint(str(folder), every_s=1e-9)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=[AtomicCheckpointIO()],
            callbacks=[
                StopBetweenSteps(last), ResumeOrder(0), *[RankState()][:is_kept], last, Seen(epochs)
            ],
        )  # fmt: skip
        torch.manual_seed(0)
        try:
            trainer.fit(
                Logs(*ends[start:]), BatchLoader(TensorDataset(x), 4, shuffle=True, seed=0),
                ckpt_path=folder / "last.ckpt" if start else None,
            )  # fmt: skip
        except Interrupted:
            assert start < len(ends)
    return {name: v for name, v in epochs[-1].items() if not name.endswith("_step")}


def test_figures_of_an_interrupted_epoch_are_those_of_all_its_steps(tmp_path: Path):
    whole = train(tmp_path / "whole")
    assert len(whole) == 14
    assert train(tmp_path / "once", 4) == whole
    assert train(tmp_path / "late", 6) == whole
    assert train(tmp_path / "twice", 3, 5) == whole
    assert train(tmp_path / "before", 0) == whole
    lost = train(tmp_path / "lost", 4, is_kept=False)
    assert lost["sum"] != whole["sum"]
    assert lost["mean_error"] != whole["mean_error"]
