"""A skeleton: the smallest model and data that keep every promise. Replace both by your own.

python train.py data=skeleton model=skeleton \
    callbacks.checkpoints.monitor=val/loss callbacks.checkpoints.mode=min
"""

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep.data.loader import BatchLoader
from samestep.metrics import EpochMean


class SkeletonData(L.LightningDataModule):
    """442 patients, each with ten measurements x and the progress y of their diabetes.

    Args:
        global_batch_size: patients per optimizer step, over all ranks.
        seed: of the order.
    """

    def __init__(self, global_batch_size: int, seed: int) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.predict_files: list[str] = []

    def setup(self, stage: str) -> None:
        """Split the patients into 300 for training, 71 for validation and 71 for the test."""
        x, y = (torch.tensor(array).float() for array in load_diabetes(return_X_y=True))
        whole = TensorDataset(20 * x, y[:, None] / 100)  # float32 [442, 10] and [442, 1]
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
        self.train, self.val, self.test = (
            TensorDataset(*whole[ids]) for ids in torch.split(order, [300, 71, 71])
        )

    def train_dataloader(self) -> BatchLoader:
        """Whole batches in a new order each epoch."""
        return BatchLoader(
            self.train, self.global_batch_size, shuffle=True, drop_last=True, seed=self.seed
        )

    def val_dataloader(self) -> BatchLoader:
        """All of ``val`` in one batch."""
        return BatchLoader(self.val, len(self.val))

    def test_dataloader(self) -> BatchLoader:
        """All of ``test`` in one batch."""
        return BatchLoader(self.test, len(self.test))

    def predict_dataloader(self) -> BatchLoader:
        """The patients in the files that ``samestep predict`` names, or those of the test.

        A file is CSV without a heading: ten numbers a row, scaled as ``load_diabetes`` does.
        """
        if not self.predict_files:
            return self.test_dataloader()
        tables = [np.loadtxt(f, np.float32, delimiter=",", ndmin=2) for f in self.predict_files]
        return BatchLoader(TensorDataset(20 * torch.from_numpy(np.concatenate(tables))), 1024)


class SkeletonModel(L.LightningModule):
    """A net with one hidden layer, trained by the squared error.

    Logs ``<stage>/loss``, the mean squared error, once per epoch and over all ranks.

    Args:
        hidden_size: units of the hidden layer.
        lr: learning rate of Adam.
    """

    def __init__(self, hidden_size: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(10, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 1))
        self.example_input_array = torch.zeros(2, 10)  # what samestep export traces
        self.train_sums = EpochMean("train", "loss")
        self.val_sums = EpochMean("val", "loss")
        self.test_sums = EpochMean("test", "loss")

    def forward(self, x: Tensor) -> Tensor:
        """Progress ``[B, 1]`` of measurements ``[B, 10]``."""
        progress: Tensor = self.net(x)
        return progress

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The columns that ``samestep predict`` writes."""
        return {"progress": 100 * self(batch[0])}

    def score(self, batch: list[Tensor], sums: EpochMean) -> Tensor:
        """Mean squared error of a batch, x ``[B, 10]`` and y ``[B, 1]``, which ``sums`` counts."""
        x, y = batch
        loss = F.mse_loss(self(x), y, reduction="sum")
        sums.update(len(x), loss=loss)
        return loss / len(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss to minimize."""
        return self.score(batch, self.train_sums)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Count the loss."""
        self.score(batch, self.val_sums)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Count the loss."""
        self.score(batch, self.test_sums)

    def on_train_epoch_end(self) -> None:
        """Log the mean of the epoch; so do the next two."""
        self.log_dict(self.train_sums.means(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """See ``on_train_epoch_end``."""
        self.log_dict(self.val_sums.means(), sync_dist=True)

    def on_test_epoch_end(self) -> None:
        """See ``on_train_epoch_end``."""
        self.log_dict(self.test_sums.means(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with a constant learning rate."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
