"""Learning rates that change, and the length of a run."""

from typing import ClassVar

import torch
from torch.optim import lr_scheduler as lrs

from .base import LOADER, Exact, Plain, Regressor, Style

BY_STEP = {"interval": "step"}


class Scheduled(Regressor):
    config: ClassVar = {}

    def schedule(self, optimizer):
        raise NotImplementedError

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = {"scheduler": self.schedule(optimizer), **self.config}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Plateau(Scheduled):
    """Never satisfied, so that each of its steps counts."""

    config: ClassVar = {"monitor": "val_loss"}

    def schedule(self, optimizer):
        return lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)


class PlateauByStep(Plateau):
    config: ClassVar = {"monitor": "train_loss", "interval": "step", "frequency": 2}

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss


class EveryOtherEpoch(Plateau):
    config: ClassVar = {"monitor": "val_loss", "frequency": 2}


class OneCycle(Scheduled):
    config: ClassVar = BY_STEP

    def schedule(self, optimizer):
        total = self.trainer.estimated_stepping_batches
        return lrs.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)


class Sequential(Scheduled):
    config: ClassVar = BY_STEP

    def schedule(self, optimizer):
        warmup = lrs.LinearLR(optimizer, 0.1, total_iters=5)
        return lrs.SequentialLR(optimizer, [warmup, lrs.CosineAnnealingLR(optimizer, 22)], [5])


class Lambda(Scheduled):
    """By epoch, with a function that Lightning cannot save."""

    def schedule(self, optimizer):
        return lrs.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


class Restarts(Scheduled):
    def schedule(self, optimizer):
        return lrs.CosineAnnealingWarmRestarts(optimizer, T_0=2)


class FourierRate:
    """As timm's schedulers: no class of torch, steps by numbers of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.rate = optimizer, optimizer.param_groups[0]["lr"]

    def step(self, epoch):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate / (1 + epoch)

    def state_dict(self):
        return {"rate": self.rate}

    def load_state_dict(self, state):
        self.rate = state["rate"]


class Timm(Scheduled):
    def schedule(self, optimizer):
        return FourierRate(optimizer)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class Adaptive(Scheduled):
    """Two schedules for one optimizer."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        by_step = {"scheduler": lrs.ExponentialLR(optimizer, 0.99), "interval": "step"}
        return [optimizer], [by_step, lrs.StepLR(optimizer, 2)]


STYLES = [
    Style("ReduceLROnPlateau by epoch", Plateau, Exact),
    Style("ReduceLROnPlateau, every 2nd step", PlateauByStep, Exact),
    Style("ReduceLROnPlateau, every 2nd epoch", EveryOtherEpoch, Exact),
    Style("OneCycleLR", OneCycle, Exact),
    Style("SequentialLR: cosine with warmup", Sequential, Exact),
    Style("LambdaLR", Lambda, Exact),
    Style("CosineAnnealingWarmRestarts", Restarts, Exact),
    Style("lr_scheduler_step, no torch schedule", Timm, Exact),
    Style("two schedules for one optimizer", Adaptive, Exact),
    Style("max_steps within an epoch", Regressor, Exact, ("trainer.max_steps=22",)),
    Style("max_steps, validation every 2nd epoch", Regressor, Exact, (
        "trainer.max_steps=25", "trainer.check_val_every_n_epoch=2",
    )),
    Style("max_steps, DataLoader", Regressor, Plain, ("trainer.max_steps=22",), LOADER),
    Style("val_check_interval", Regressor, Exact, ("trainer.val_check_interval=2",)),
    Style("limit_train_batches", Regressor, Exact, ("trainer.limit_train_batches=7",)),
    Style("max_time", Regressor, Exact, ("trainer.max_time=00:01:00:00",)),
]  # fmt: skip
