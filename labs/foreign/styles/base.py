"""What most styles share: a table, a DataModule of each kind, a small regression."""

from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from samestep.data.loader import BatchLoader


class Told(NamedTuple):
    """What a run must say before its first step, where it cannot be exact.

    pattern: of the line that says it, whatever its letters.
    meaning: for the table.
    columns: in which it is an excuse; in the others a cell must be identical.
    """

    pattern: str
    meaning: str
    columns: tuple[str, ...] = ("SIGTERM", "SIGKILL", "2 ranks", "2 ranks, SIGTERM")


RANKS = ("2 ranks",)
LOADER = (Told("ordinary DataLoader", "each rank has its own batches", RANKS),)
STREAM = (Told("unknown length", "each rank sees all of a stream", RANKS),)
LOST = (Told("no checkpoint holds", "state outside the checkpoint is lost"),)


class Style(NamedTuple):
    """One row of the matrix.

    model, data: classes of this package; no data: the module has the loaders.
    overrides: what a user would type besides.
    told: what the run must say of cells that are not identical; otherwise each must be.
    is_per_rank: whether two ranks see the same samples as one, and compute something else: a step
        draws random numbers, normalizes what a rank has, or makes roundings grow.
    """

    name: str
    model: type
    data: type | None
    overrides: tuple[str, ...] = ()
    told: tuple[Told, ...] = ()
    is_per_rank: bool = False


def table(rows: int, seed: int) -> TensorDataset:
    """x ``[rows, 5]``, and the sum of its squares."""
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.square().sum(1, keepdim=True))


class Plain(L.LightningDataModule):
    """As in Lightning's documentation: 9 batches an epoch."""

    def setup(self, stage: str):
        self.train, self.val = table(36, 0), table(16, 1)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4)

    def test_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=4)


class Exact(Plain):
    """The same with a BatchLoader."""

    def train_dataloader(self) -> Any:
        return BatchLoader(self.train, 4, shuffle=True, drop_last=True, seed=7)


class Regressor(L.LightningModule):
    """As in Lightning's documentation."""

    def __init__(self, lr: float = 0.02):
        super().__init__()
        self.lr = lr
        self.net = self.make_net()

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
