"""What most styles share: a table, a DataModule of each kind, a small regression."""

from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from samestep.data.loader import BatchLoader
from samestep.verify import known_notes
from samestep.verify.known_notes import KnownNote

LOADER = (known_notes.LOADER,)
STREAM = (known_notes.STREAM,)
LOST = (known_notes.OTHER_BATCH, known_notes.OTHER_STEP)
NO_MEAN = (known_notes.LOSS,)
DRAWS = (known_notes.RANDOM_STEPS,)
NORMALIZES = (known_notes.BATCH_NORM,)


class Style(NamedTuple):
    """One row of the matrix.

    model, data: classes of this package, or the paths of those that import a library; no data:
        the module has the loaders.
    overrides: what a user would type besides.
    told: the notes by which a run may announce cells that are not identical; all others must be.
    is_per_rank: whether two ranks compute something else from the same samples, and no note says
        so: a metric of slices, a state that each rank makes from its own samples.
    in_double: whether ranks are compared with 64 bits, because roundings grow.
    """

    name: str
    model: type | str
    data: type | str | None
    overrides: tuple[str, ...] = ()
    told: tuple[KnownNote, ...] = ()
    is_per_rank: bool = False
    in_double: bool = False


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
