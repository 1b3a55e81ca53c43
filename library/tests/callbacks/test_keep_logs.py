"""Means of an epoch that was interrupted: of ``self.log`` and of torchmetrics."""

from pathlib import Path
from typing import Any

import pytest
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision

from library.tests.kit import Net, batches, check_exact, flat, rows


class Logs(Net):
    """Logs in every style."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_error = MeanSquaredError()
        self.both = MetricCollection([BinaryAccuracy(), BinaryPrecision()])
        self.all = CatMetric()

    def training_step(self, batch, batch_idx):
        x = flat(batch)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"most": x.max(), "number": batch_idx}, on_epoch=True, reduce_fx="max")
        self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        if batch_idx == 0:
            self.log("of_the_first", loss, on_step=False, on_epoch=True)
        self.mean_error(x, x.sqrt())
        self.log("mean_error", self.mean_error, on_step=False, on_epoch=True)
        self.both.update(x / 27, x > 10)
        self.all.update(x)
        return loss

    def on_train_batch_end(self, *args):
        self.log("late", self.head.weight.detach().square().sum(), on_epoch=True)

    def on_train_epoch_end(self):
        self.log_dict(self.both.compute())
        self.log("all", self.all.compute().sum())
        self.both.reset()
        self.all.reset()


@pytest.mark.filterwarnings("ignore:.*`cat` reduction.*:UserWarning")
def test_figures_of_an_interrupted_epoch_are_those_of_all_its_steps(tmp_path: Path):
    def data() -> Any:
        return batches(27)  # seven batches, the last one shorter

    places: Any = [(1, "start"), (1, 2), (1, 4), (1, 5), (1, 6)]
    check_exact(tmp_path, Logs, data, *places, how="SIGKILL", save_every_s=1e-9)
    figures = rows(tmp_path / "whole")[-1]
    assert {"loss_epoch", "late_epoch", "mean_error", "BinaryPrecision"} <= figures.keys()
    assert (float(figures["sum"]), float(figures["all"])) == (351, 351)
