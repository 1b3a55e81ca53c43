"""What is logged, and how it is put together."""

import torch
from torch.nn import functional as F
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, R2Score

from .base import Exact, Regressor, Style


class Torchmetrics(Regressor):
    """Metrics as objects: Lightning computes and resets them."""

    def __init__(self):
        super().__init__()
        self.train_error, self.val_error, self.test_error = (MeanSquaredError() for _ in range(3))

    def step(self, batch, error, name):
        x, y = batch
        guess = self.net(x)
        error(guess, y)
        self.log(name, error, on_step=False, on_epoch=True)
        return F.mse_loss(guess, y)

    def training_step(self, batch, batch_idx):
        return self.step(batch, self.train_error, "train_error")

    def validation_step(self, batch, batch_idx):
        self.step(batch, self.val_error, "val_loss")

    def test_step(self, batch, batch_idx):
        self.step(batch, self.test_error, "test_loss")


class Collected(Regressor):
    """Metrics that are computed by hand when an epoch ends."""

    def __init__(self):
        super().__init__()
        metrics = MetricCollection([MeanSquaredError(), R2Score()])
        self.train_metrics, self.val_metrics = metrics.clone("train_"), metrics.clone("val_")
        self.train_mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        guess = self.net(x)
        loss = F.mse_loss(guess, y)
        self.train_metrics.update(guess, y)
        self.train_mean.update(loss)
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.train_metrics.compute())
        self.log("train_mean", self.train_mean.compute())
        self.train_metrics.reset()
        self.train_mean.reset()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.val_metrics.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


class OnEpoch(Regressor):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class NotReduced(Regressor):
    """No sync_dist, as in all examples of Lightning."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


class Collects(Regressor):
    """Keeps the outputs of an epoch in a list, as since Lightning 2.0."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("train_mean", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


class EachStep(Regressor):
    """Logs steps of validation and test too."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)


class Reduced(Regressor):
    """Logs sums, largest values, and by a function of torch."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        epoch = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("largest", loss.detach(), reduce_fx="max", **epoch)
        self.log("total", loss.detach(), reduce_fx=torch.sum, **epoch)
        return loss


STYLES = [
    Style("self.log(on_epoch=True), sync_dist", OnEpoch, Exact),
    Style("torchmetrics, logged as objects", Torchmetrics, Exact),
    Style("torchmetrics, computed by hand", Collected, Exact),
    Style("no sync_dist", NotReduced, Exact),
    Style("outputs kept in a list", Collects, Exact),
    Style("on_step=True in validation and test", EachStep, Exact, (
        "callbacks.checkpoints.monitor=val_loss_epoch",
    )),
    Style("reduce_fx", Reduced, Exact, is_per_rank=True),
]  # fmt: skip
