"""Data to start from: replace them by your own.

python train.py data=skeleton model=skeleton \
    callbacks.checkpoints.monitor=val/loss callbacks.checkpoints.mode=min
"""

import lightning as L
import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import TensorDataset

from samestep import BatchLoader

# ruff: noqa: D102  # what each hook is for: Lightning's documentation


class SkeletonData(L.LightningDataModule):
    """442 patients, each with ten measurements x and the progress y of their diabetes."""

    def __init__(self, global_batch_size: int, seed: int) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size  # patients per optimizer step, over all ranks
        self.seed = seed  # of the order

    def setup(self, stage: str) -> None:
        x, y = (torch.tensor(array).float() for array in load_diabetes(return_X_y=True))
        order = torch.randperm(442, generator=torch.Generator().manual_seed(0))
        parts = torch.split(order, [300, 71, 71])
        sets = [TensorDataset(20 * x[part], y[part, None] / 100) for part in parts]
        self.train, self.val, self.test = sets

    def train_dataloader(self) -> BatchLoader:
        size, seed = self.global_batch_size, self.seed
        return BatchLoader(self.train, size, shuffle=True, drop_last=True, seed=seed)

    def val_dataloader(self) -> BatchLoader:
        return BatchLoader(self.val, len(self.val))

    def test_dataloader(self) -> BatchLoader:
        return BatchLoader(self.test, len(self.test))
