"""Layers that may see more than a sample, under a plain mean of losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import samestep

from .base import GATHER, Shape, TaskOf, mlp, table
from .classes import cross_entropy


class StochasticDepth(nn.Module):
    """Leaves out a block for some samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.block(x)
        keeps = torch.rand(len(x), 1) < 0.8
        return x + keeps * self.block(x) / 0.8


class Centered(nn.Module):
    """Subtracts the mean of the batch, also in evaluation."""

    def __init__(self, gathers: bool = False) -> None:
        super().__init__()
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        whole = samestep.gather_batch(x) if self.gathers else x
        return x - whole.mean(0)


class Frozen(nn.BatchNorm1d):
    """Batch norm that stays in evaluation, as when a backbone is fine-tuned."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.eval()

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class OwnNorm(nn.Module):
    """Batch norm that somebody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)


class SeesChannels(nn.Module):
    """Instance norm, over the numbers of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(1, (2, 4))).flatten(1)


def shape(name: str, *layers: Callable[[], nn.Module]) -> Shape:
    def make_net() -> nn.Module:
        return mlp(4, 3, *[make() for make in layers])

    return Shape(name, table, TaskOf(make_net, cross_entropy))


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))


def centered(gathers: bool) -> Callable[[], Any]:
    return TaskOf(lambda: mlp(4, 3, Centered(gathers)), cross_entropy)


SHAPES = (
    shape("BatchNorm", lambda: nn.BatchNorm1d(8)),
    shape("BatchNorm, frozen", lambda: Frozen(8)),
    shape("batch norm of one's own", OwnNorm),
    Shape("features centered by the batch", table, centered(False), GATHER, centered(True)),
    shape("GroupNorm", lambda: nn.GroupNorm(2, 8)),
    shape("LayerNorm", lambda: nn.LayerNorm(8)),
    shape("InstanceNorm", SeesChannels),
    shape("spectral norm", spectral),
    shape("Dropout", lambda: nn.Dropout(0.2))._replace(draws=True),
    shape("Dropout(0)", lambda: nn.Dropout(0.0)),
    shape("stochastic depth", StochasticDepth)._replace(draws=True),
)
