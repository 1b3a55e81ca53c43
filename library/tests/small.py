"""A small model and its data, which tests disturb by variables, and a script that trains it.

``python -m library.tests.small '{"run_dir": "mine", "max_epochs": 2}'`` is the plain script. Other
front ends name ``Net`` and ``Data``.

``AT``       optimizer step, counted from 0, in which something happens, on the last rank
``HOW``      what happens: a name of a signal; ``nan`` is a loss
``DATA``     ``missing``: there are none
``UNUSED``   the model has a parameter without a gradient
"""

import json
import os
import signal
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samestep import BatchLoader, RunError, Trainer
from samestep.run.artifacts import Artifacts


class Net(L.LightningModule):
    """Learns a sum, and is disturbed on purpose."""

    def __init__(self, hidden_size: int = 9, lr: float = 0.01) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1))
        self.lr = lr
        if os.environ.get("UNUSED"):
            self.unused = nn.Linear(2, 2)

    def loss(self, batch):
        x, y = batch
        return (self.net(x.to(self.dtype)) - y.to(self.dtype)).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        is_last = self.global_rank == self.trainer.world_size - 1
        if is_last and self.global_step == int(os.environ.get("AT", -1)):
            if os.environ["HOW"] == "nan":
                loss = loss * float("nan")
            else:
                os.kill(os.getpid(), signal.Signals[os.environ["HOW"]])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


class Data(L.LightningDataModule):
    """64 samples: eight steps an epoch."""

    def __init__(self, global_batch_size: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.global_batch_size, self.seed = global_batch_size, seed

    def setup(self, stage):
        if os.environ.get("DATA") == "missing":
            raise RunError("the samples are missing; make some")
        x = torch.randn(64, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.samples = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return BatchLoader(self.samples, self.global_batch_size, shuffle=True, seed=self.seed)

    def val_dataloader(self):
        return DataLoader(self.samples, batch_size=32)

    test_dataloader = val_dataloader


def main() -> None:
    options = json.loads(sys.argv[1])
    callbacks = []
    if "url" in options:
        callbacks.append(Artifacts(options.pop("url"), options["run_dir"], 20.0))
    if "stop_on" in options:
        callbacks.append(EarlyStopping(options.pop("stop_on")))
    if options.get("strategy") == "DDPStrategy":
        options["strategy"] = DDPStrategy(static_graph=False)
    plain = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=callbacks, **plain, **options)
    model, data = Net(), Data()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)


if __name__ == "__main__":
    main()
