"""Losses of numbers, of several tasks, of times."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

from .base import GATHER, MEAN, NUM_SAMPLES, Loss, Shape, TaskOf, mlp, normal, numbers


def squared_error(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(net(x)[:, 0], y)


def huber(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.huber_loss(net(x)[:, 0], y)


def quantiles(net: Any, batch: Any) -> Tensor:
    x, y = batch
    levels = torch.tensor([0.1, 0.5, 0.9])
    errors = y[:, None] - net(x)
    return torch.maximum(levels * errors, (levels - 1) * errors).mean()


def gaussian(net: Any, batch: Any) -> Tensor:
    x, y = batch
    mean, log_variance, _ = net(x).unbind(1)
    return F.gaussian_nll_loss(mean, y, log_variance.exp())


def root_mean_square(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(net(x)[:, 0], y).sqrt()


def root_mean_square_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return samestep.mean((net(x)[:, 0] - y).square()).sqrt()


def relative_error(net: Any, batch: Any) -> Tensor:
    """WAPE: the sum of errors, divided by the sum of targets."""
    x, y = batch
    return (net(x)[:, 0] - y).abs().sum() / y.abs().sum()


def relative_error_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return samestep.mean((net(x)[:, 0] - y).abs() / y.abs(), y.abs())


def pearson_of(preds: Tensor, y: Tensor) -> Tensor:
    preds, y = preds - preds.mean(), y - y.mean()
    return 1 - (preds * y).sum() / (preds.norm() * y.norm())


def pearson(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return pearson_of(net(x)[:, 0], y)


def pearson_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return pearson_of(samestep.gather_batch(net(x)[:, 0]), samestep.gather_batch(y))


def r_squared(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return (net(x)[:, 0] - y).square().sum() / (y - y.mean()).square().sum()


def r_squared_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    preds, y = samestep.gather_batch(net(x)[:, 0]), samestep.gather_batch(y)
    return (preds - y).square().sum() / (y - y.mean()).square().sum()


def l2_term(net: Any, batch: Any) -> Tensor:
    x, y = batch
    penalty = sum(parameter.square().sum() for parameter in net.parameters())
    return F.mse_loss(net(x)[:, 0], y) + 0.01 * penalty


def several_tasks(net: Any, batch: Any) -> Tensor:
    x, y = batch
    preds = net(x)
    return F.mse_loss(preds[:, 0], y) + 0.5 * F.l1_loss(preds[:, 1], x[:, 0])


def missing_targets(net: Any, batch: Any) -> Tensor:
    """Several tasks, each with the samples that have a target for it."""
    x, y = batch
    preds = net(x)
    loss = preds.new_zeros(())
    for task in range(2):
        has_target = x[:, task] > 0.5
        loss = loss + F.mse_loss(preds[has_target, task], y[has_target])
    return loss


def missing_targets_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    preds = net(x)
    loss = preds.new_zeros(())
    for task in range(2):
        loss = loss + samestep.mean((preds[:, task] - y).square(), x[:, task] > 0.5)
    return loss


class Uncertain(nn.Module):
    """A net, and the logarithm of the variance of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_variances = mlp(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def uncertainty(net: Any, batch: Any) -> Tensor:
    """Tasks weighted by learned variances (Kendall et al. 2018)."""
    x, y = batch
    preds = net(x)
    losses = torch.stack([F.mse_loss(preds[:, 0], y), F.mse_loss(preds[:, 1], x[:, 0])])
    return (losses * (-net.log_variances).exp() + net.log_variances).sum()


def lives() -> TensorDataset:
    """x ``[4]``, a time, and whether something happened then."""
    x, noise = normal(NUM_SAMPLES, 4), normal(NUM_SAMPLES, seed=7)
    return TensorDataset(x, (x[:, 0] + 0.5 * noise).exp(), noise > -0.3)


def cox_of(risks: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """The partial likelihood: each event against all that were still at risk."""
    order = times.argsort(descending=True)
    risks, events = risks[order], events[order]
    return -(risks - risks.logcumsumexp(0))[events].mean()


def cox(net: Any, batch: Any) -> Tensor:
    x, times, events = batch
    return cox_of(net(x)[:, 0], times, events)


def cox_gathered(net: Any, batch: Any) -> Tensor:
    x, times, events = batch
    gathered = [samestep.gather_batch(tensor) for tensor in (net(x)[:, 0], times, events)]
    return cox_of(*gathered)


def shape(
    name: str,
    loss: Loss,
    remedy: str = "",
    mended: Loss | None = None,
    net: Callable[[], nn.Module] = mlp,
) -> Shape:
    other = None if mended is None else TaskOf(net, mended)
    return Shape(name, numbers, TaskOf(net, loss), remedy, other)


SHAPES = (
    shape("mean squared error", squared_error),
    shape("Huber", huber),
    shape("quantiles (pinball)", quantiles),
    shape("Gaussian likelihood", gaussian),
    shape("RMSE", root_mean_square, MEAN, root_mean_square_mean),
    shape("WAPE: sum of errors / sum of targets", relative_error, MEAN, relative_error_mean),
    shape("Pearson correlation", pearson, GATHER, pearson_gathered),
    shape("R2", r_squared, GATHER, r_squared_gathered),
    shape("a term for the weights (L2)", l2_term),
    shape("several tasks: a sum of means", several_tasks),
    shape("several tasks, targets missing", missing_targets, MEAN, missing_targets_mean),
    shape("several tasks, learned variances", uncertainty, net=Uncertain),
    Shape("Cox partial likelihood", lives, TaskOf(mlp, cox), GATHER, TaskOf(mlp, cox_gathered)),
)
