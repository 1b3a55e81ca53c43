"""Means of an epoch that was interrupted: of ``self.log`` and of torchmetrics."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torchmetrics import (
    CatMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MetricTracker,
    MinMetric,
)  # fmt: skip
from torchmetrics.classification import BinaryAccuracy, BinaryPrecision, MulticlassAccuracy

from library.tests.kit import Net, batches, check_exact, check_same, fit, flat, rows


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


class FirstBatch(Net):
    """Logs in the first batch of each epoch only."""

    def __init__(self) -> None:
        super().__init__()
        self.of_epoch, self.of_both = MeanMetric(), MeanMetric()
        self.of_classes = MulticlassAccuracy(2, average=None)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            for reduction in ("mean", "max", "min", "sum"):
                options: Any = {"reduce_fx": reduction, "on_step": False, "on_epoch": True}
                self.log(reduction, loss, sync_dist=True, **options)
            self.log("of_64_bits", loss.double() / 3, on_step=False, on_epoch=True)
            self.log("step", loss)
            self.log("both", loss, on_step=True, on_epoch=True)
            self.of_epoch.update(loss)
            self.log("object", self.of_epoch, on_step=False, on_epoch=True)
            self.of_both(loss)
            self.log("object_of_both", self.of_both, on_step=True, on_epoch=True)
            # One value for each class, which callbacks may read.
            self.of_classes((flat(batch) > 8).long(), (flat(batch) > 4).long())
            self.log("classes", self.of_classes, on_step=True, on_epoch=False, logger=False)
        return loss


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_what_is_logged_once_in_an_epoch_is_kept_and_logged_again_in_the_next(
    tmp_path: Path, how: str
):
    options: dict[str, Any] = {"how": how, "save_every_s": 1e-9, "max_epochs": 3}
    check_exact(tmp_path, FirstBatch, batches, (0, 1), (1, 0), **options)
    logged = {name for row in rows(tmp_path / "whole") for name in row}
    assert {"object", "object_of_both_step", "object_of_both_epoch", "of_64_bits"} <= logged


def test_a_program_may_log_in_another_way_when_it_continues(tmp_path: Path):
    starts = count()

    class Shows(Net):
        def training_step(self, batch, batch_idx):
            loss, is_shown = self.loss(batch), self.start > 0
            self.log("mean", loss, prog_bar=is_shown, on_step=False, on_epoch=True)
            self.log("step", loss, prog_bar=is_shown)
            return loss

        def __init__(self) -> None:
            super().__init__()
            self.start = next(starts)

    fit(tmp_path / "whole", Shows)
    fit(tmp_path / "parts", Shows, places=[(0, 1), (1, 2)])
    assert next(starts) == 4
    check_same(tmp_path / "parts", tmp_path / "whole")


class Grouped(Net):
    """Has two metrics that share their sums, as those of a collection do if they are equal."""

    def __init__(self) -> None:
        super().__init__()
        errors = {"error": MeanSquaredError(), "root": MeanSquaredError(squared=False)}
        self.train_errors = MetricCollection(errors)
        self.val_errors = self.train_errors.clone(prefix="val_")

    def training_step(self, batch, batch_idx):
        self.train_errors.update(flat(batch), flat(batch).sqrt())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log_dict(self.train_errors.compute())
        self.train_errors.reset()

    def validation_step(self, batch, batch_idx):
        self.val_errors.update(flat(batch) * self.head.weight[0, 0], flat(batch))

    def on_validation_epoch_end(self):
        self.log_dict(self.val_errors.compute())
        self.val_errors.reset()


def test_metrics_that_share_their_sums_count_each_batch_once(tmp_path: Path):
    check_exact(tmp_path, Grouped, batches, (0, 1), (1, 1))


class Tracked(Net):
    """Tracks a metric over its epochs, which it begins in a hook that is not called again."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.of_end = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.tracker.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.of_end.increment()
        self.of_end.update(self.tracker.compute())
        best, epoch = self.of_end.best_metric(return_step=True)
        self.log_dict({"best": best, "which": float(epoch), "first": self.tracker[1].compute()})


def test_a_tracker_continues_with_all_its_metrics(tmp_path: Path, capsys):
    _, parts = check_exact(tmp_path, Tracked, batches, (0, "start"), (0, 1), (1, 1))
    trackers = parts[-1].module.tracker, parts[-1].module.of_end
    assert [tracker.n_steps for tracker in trackers] == [2, 2]
    assert "Note: " not in capsys.readouterr().out


class Best(Net):
    """Forgets at each start what the sanity check has counted, as a common template does."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest = MinMetric()

    def on_train_start(self):
        self.lowest.reset()

    def on_validation_epoch_end(self):
        self.lowest(1.0 + self.current_epoch)
        self.log("lowest", self.lowest.compute())


def test_a_module_may_reset_its_metrics_when_training_starts(tmp_path: Path):
    check_exact(tmp_path, Best, batches, (1, 1))
    assert [row["lowest"] for row in rows(tmp_path / "whole") if row.get("lowest")] == ["1.0"] * 2
