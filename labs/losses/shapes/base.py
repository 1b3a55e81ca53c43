"""What most shapes share: a table, a small net, and a module that minimizes a loss of both."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

NUM_SAMPLES = 94
"""Batches of 25, 25, 25 and 19 samples: neither 2 nor 3 ranks can split them equally."""

MEAN = "`samestep.mean`"
GATHER = "`samestep.gather_batch`"
DRAWN = "numbers drawn by the data set"

Loss = Callable[[Any, Any], Tensor]
"""Of a net and a batch."""


class Shape(NamedTuple):
    """One row of the table.

    data: makes a map-style data set of ``NUM_SAMPLES`` samples.
    model: makes the module as people write it.
    remedy: what the other form uses; empty if there is none.
    mended: makes the module with the remedy.
    mended_data: its data set, if it needs another one.
    collate: samples to a batch.
    is_manual: whether the module calls its optimizers itself, so that Lightning neither clips nor
        accumulates.
    draws: whether a step draws random numbers, as people write it.
    """

    name: str
    data: Callable[[], Any]
    model: Callable[[], L.LightningModule]
    remedy: str = ""
    mended: Callable[[], L.LightningModule] | None = None
    mended_data: Callable[[], Any] | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    is_manual: bool = False
    draws: bool = False


class Task(L.LightningModule):
    """A net and its loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TaskOf:
    """Makes the same task each time it is called: a trainer seeds the weights before."""

    def __init__(self, make_net: Callable[[], nn.Module], loss: Loss) -> None:
        self.make_net, self.loss = make_net, loss

    def __call__(self) -> L.LightningModule:
        return Task(self.make_net(), self.loss)


def mlp(num_inputs: int = 4, num_outputs: int = 3, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, 8), *between, nn.Tanh(), nn.Linear(8, num_outputs))


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def table() -> TensorDataset:
    """x ``[4]``, and a class of three."""
    x = normal(NUM_SAMPLES, 4)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 1] > 0.5).long())


def two_views() -> TensorDataset:
    """Two disturbed forms of x ``[4]``, and its class."""
    x, y = table().tensors
    first, second = normal(2, NUM_SAMPLES, 4, seed=2)
    return TensorDataset(x + 0.3 * first, x + 0.3 * second, y)


def numbers() -> TensorDataset:
    """x ``[4]``, and a number to predict."""
    x = normal(NUM_SAMPLES, 4)
    return TensorDataset(x, x.square().sum(1) / 4 + 0.5)


def with_noise(make_data: Callable[[], TensorDataset], *shapes: Sequence[int]) -> Callable[[], Any]:
    """The same data set with random numbers for each sample, which are part of the batch."""

    def make() -> TensorDataset:
        noise = []
        for seed, shape in enumerate(shapes, 10):
            noise.append(normal(NUM_SAMPLES, *shape, seed=seed))
        return TensorDataset(*make_data().tensors, *noise)

    return make
