"""What a batch is."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from samestep.data.loader import BatchLoader

from .base import Exact, Regressor, Style


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


class Graph:
    """As PyTorch Geometric's Batch: an object that moves itself."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.edge_index = torch.tensor([[0, 1], [1, 0]])
        self.num_graphs = len(x)

    def to(self, device, non_blocking=False):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class AsObjects:
    """A data set that gives batches of another kind."""

    def __init__(self, rows, kind):
        self.rows, self.kind = rows, kind

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, ids):
        return self.kind(*self.rows[ids])


class ObjectData(Exact):
    kind = Graph

    def train_dataloader(self):
        rows = AsObjects(self.train, type(self).kind)
        return BatchLoader(rows, 4, shuffle=True, drop_last=True, seed=7)


class PairData(ObjectData):
    kind = Pair


class RecordData(ObjectData):
    kind = Record


class DictData(ObjectData):
    kind = staticmethod(lambda x, y: {"inputs": x, "labels": y})


class FromObjects(Regressor):
    def loss(self, batch):
        if isinstance(batch, dict):
            batch = batch.values()
        elif hasattr(batch, "x"):
            batch = batch.x, batch.y
        return super().loss(batch)


class FromGraphs(FromObjects):
    """Says how long a batch is, as an object cannot."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True, batch_size=batch.num_graphs, sync_dist=True)
        return loss


STYLES = [
    Style("batches are objects with .to(), in the style of PyG", FromGraphs, ObjectData),
    Style("batches are dictionaries", FromObjects, DictData),
    Style("batches are named tuples", FromObjects, PairData),
    Style("batches are dataclasses", FromObjects, RecordData),
]
