"""Callbacks of Lightning and of the user."""

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from .base import Exact, Regressor, Style

HERE = __name__


def added(name: str, target: str, *values: str) -> tuple[str, ...]:
    """The overrides that add a callback."""
    node = f"+callbacks.{name}"
    return (f"{node}._target_={target}", *(f"{node}.{value}" for value in values))


def lightning(name: str, *values: str) -> tuple[str, ...]:
    return added("lightning", f"lightning.pytorch.callbacks.{name}", *values)


class Parts(Regressor):
    """A backbone and a head: only the head is trained at first."""

    def make_net(self):
        backbone = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        return nn.Sequential(backbone, nn.Linear(8, 1))

    @property
    def backbone(self):
        return self.net[0]

    def configure_optimizers(self):
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)


class Unfreeze(BaseFinetuning):
    """Adds the backbone to the optimizer in epoch 1."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class UnfreezeByHand(Parts):
    """The same in a hook of the module."""

    def __init__(self):
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            group = {"params": list(self.backbone.parameters()), "lr": 0.01}
            self.optimizers().optimizer.add_param_group(group)


class Tunable(Regressor):
    """As the tuner wants it."""

    def __init__(self):
        super().__init__()
        self.learning_rate = 0.02
        self.batch_size = 4

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Annealing(L.Callback):
    """A callback with a state: it shrinks the rate each time that the loss grows."""

    def __init__(self):
        self.factor, self.before = 1.0, float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = float(trainer.callback_metrics["train_loss"])
        self.factor *= 0.97 if loss > self.before else 1.0
        self.before = loss
        trainer.optimizers[0].param_groups[0]["lr"] = 0.02 * self.factor

    def state_dict(self):
        return {"factor": self.factor, "before": self.before}

    def load_state_dict(self, state):
        self.factor, self.before = state["factor"], state["before"]


class Forgetful(Annealing):
    """The same without its state."""

    state_dict = L.Callback.state_dict
    load_state_dict = L.Callback.load_state_dict


class FromCheckpoint(Annealing):
    """The same, with its state in the checkpoint."""

    state_dict = L.Callback.state_dict
    load_state_dict = L.Callback.load_state_dict

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["annealing"] = (self.factor, self.before)

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.factor, self.before = checkpoint["annealing"]


STYLES = [
    Style("EMAWeightAveraging", Regressor, Exact, ("callbacks=ema",)),
    Style("WeightAveraging", Regressor, Exact, lightning("WeightAveraging")),
    Style("StochasticWeightAveraging", Regressor, Exact, lightning(
        "StochasticWeightAveraging", "swa_lrs=0.01", "swa_epoch_start=1",
    )),
    Style("LearningRateFinder", Tunable, Exact, lightning(
        "LearningRateFinder", "num_training_steps=5",
    )),
    Style("BatchSizeFinder", Tunable, Exact, lightning("BatchSizeFinder", "max_trials=2")),
    Style("BaseFinetuning: unfreezes in epoch 1", Parts, Exact, added(
        "unfreeze", f"{HERE}.Unfreeze",
    )),
    Style("BackboneFinetuning", Parts, Exact, lightning(
        "BackboneFinetuning", "unfreeze_backbone_at_epoch=1",
    )),
    Style("add_param_group in the module", UnfreezeByHand, Exact),
    Style("EarlyStopping", Regressor, Exact, lightning(
        "EarlyStopping", "monitor=val_loss", "min_delta=10.0", "patience=2",
    )),
    Style("ModelCheckpoint of the user", Regressor, Exact, lightning(
        "ModelCheckpoint", "monitor=val_loss", "save_top_k=1",
    )),
    Style("GradientAccumulationScheduler", Regressor, Exact, lightning(
        "GradientAccumulationScheduler", "scheduling={1:3}",
    )),
    Style("Timer", Regressor, Exact, lightning("Timer", "duration=00:01:00:00")),
    Style("LearningRateMonitor", Regressor, Exact, lightning("LearningRateMonitor")),
    Style("callback with a state", Regressor, Exact, added("own", f"{HERE}.Annealing")),
    Style("callback with a state in the checkpoint", Regressor, Exact, added(
        "own", f"{HERE}.FromCheckpoint",
    )),
    Style("callback that forgets its state", Regressor, Exact, added(
        "own", f"{HERE}.Forgetful",
    )),
]  # fmt: skip
