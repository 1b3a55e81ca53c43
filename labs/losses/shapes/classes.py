"""Losses of classifiers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep

from .base import DRAWN, GATHER, MEAN, Loss, Shape, TaskOf, mlp, table, with_noise

CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


def cross_entropy(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y)


def label_smoothing(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y, label_smoothing=0.1)


def class_weights(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y, weight=CLASS_WEIGHTS)


def class_weights_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = F.cross_entropy(net(x), y, reduction="none")
    return samestep.mean(losses, CLASS_WEIGHTS[y])


def smooth_weights(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y, weight=CLASS_WEIGHTS, label_smoothing=0.1)


def smooth_weights_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = F.cross_entropy(net(x), y, weight=CLASS_WEIGHTS, label_smoothing=0.1, reduction="none")
    # These losses have the weights already, and torch divides by those of the targets.
    weights = CLASS_WEIGHTS[y]
    return samestep.mean(losses / weights, weights)


def with_unlabelled(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x[:, 0] > 0.8, y, -100)


def ignore_index(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), with_unlabelled(x, y))


def ignore_index_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    targets = with_unlabelled(x, y)
    losses = F.cross_entropy(net(x), targets, reduction="none")
    return samestep.mean(losses, targets != -100)


def focal_of_samples(logits: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(logits, y, reduction="none")
    return (1 - torch.exp(-ce)) ** 2 * ce


def focal(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return focal_of_samples(net(x), y).mean()


def focal_by_positives(net: Any, batch: Any) -> Tensor:
    """As detectors do: the sum over all anchors, divided by the number of objects."""
    x, y = batch
    return focal_of_samples(net(x), y).sum() / (y > 0).sum().clamp(min=1)


def focal_by_positives_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    total = samestep.mean(focal_of_samples(net(x), y))
    return total / samestep.mean((y > 0).double())


def bce_pos_weight(net: Any, batch: Any) -> Tensor:
    x, y = batch
    targets = F.one_hot(y, 3).to(x)
    return F.binary_cross_entropy_with_logits(net(x), targets, pos_weight=CLASS_WEIGHTS)


def hardest_samples(net: Any, batch: Any) -> Tensor:
    """Online hard example mining: the mean over the hardest half of the batch."""
    x, y = batch
    losses = F.cross_entropy(net(x), y, reduction="none")
    return losses.topk((len(losses) + 1) // 2).values.mean()


def hardest_samples_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = samestep.gather_batch(F.cross_entropy(net(x), y, reduction="none"))
    return losses.topk((len(losses) + 1) // 2).values.mean()


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distillation(net: Any, batch: Any) -> Tensor:
    x, y = batch
    ours, theirs = net(x)
    temperature = 3.0
    soft = F.kl_div(
        F.log_softmax(ours / temperature, 1),
        F.softmax(theirs / temperature, 1),
        reduction="batchmean",
    )
    return 0.5 * F.cross_entropy(ours, y) + 0.5 * temperature**2 * soft


def kl_batchmean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    targets = 0.8 * F.one_hot(y, 3).to(x) + 0.2 / 3
    return F.kl_div(F.log_softmax(net(x), 1), targets, reduction="batchmean")


def entropy_of_mean(net: Any, batch: Any) -> Tensor:
    """Information maximization: certain predictions, and all classes equally often."""
    x, y = batch
    logits = net(x)
    mean = logits.softmax(1).mean(0)
    return F.cross_entropy(logits, y) + (mean * mean.log()).sum()


def entropy_of_mean_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    logits = net(x)
    mean = samestep.gather_batch(logits.softmax(1)).mean(0)
    return F.cross_entropy(logits, y) + (mean * mean.log()).sum()


def mixup(net: Any, batch: Any) -> Tensor:
    x, y = batch
    share = torch.distributions.Beta(0.4, 0.4).sample().item()
    other = torch.randperm(len(x))
    logits = net(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


def sum_by_constant(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y, reduction="sum") / 25


def sum_by_constant_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = F.cross_entropy(net(x), y, reduction="none")
    return samestep.gather_batch(losses).sum() / 25


def weights_of_samples(net: Any, batch: Any) -> Tensor:
    """Importance weights, which the batch normalizes."""
    x, y = batch
    weights = x[:, 2].exp()
    losses = F.cross_entropy(net(x), y, reduction="none")
    return (losses * weights / weights.sum()).sum()


def weights_of_samples_mean(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return samestep.mean(F.cross_entropy(net(x), y, reduction="none"), x[:, 2].exp())


def worst_group(net: Any, batch: Any) -> Tensor:
    """Group DRO: the group with the largest mean loss."""
    x, y = batch
    return largest_mean(F.cross_entropy(net(x), y, reduction="none"), x[:, 3] > 0)


def worst_group_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    losses = samestep.gather_batch(F.cross_entropy(net(x), y, reduction="none"))
    return largest_mean(losses, samestep.gather_batch(x[:, 3] > 0))


def largest_mean(losses: Tensor, group: Tensor) -> Tensor:
    return torch.stack([losses[group].mean(), losses[~group].mean()]).max()


def policy_gradient(net: Any, batch: Any) -> Tensor:
    """Advantages that are normalized by the batch, as in PPO."""
    x, y = batch
    returns = x.square().sum(1)
    advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
    return (F.cross_entropy(net(x), y, reduction="none") * advantages).mean()


def policy_gradient_gathered(net: Any, batch: Any) -> Tensor:
    x, y = batch
    returns = x.square().sum(1)
    all_returns = samestep.gather_batch(returns)
    advantages = (returns - all_returns.mean()) / (all_returns.std() + 1e-8)
    return (F.cross_entropy(net(x), y, reduction="none") * advantages).mean()


def noisy_inputs(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), y)


def noisy_inputs_drawn(net: Any, batch: Any) -> Tensor:
    x, y, noise = batch
    return F.cross_entropy(net(x + 0.1 * noise), y)


def shape(name: str, loss: Loss, remedy: str = "", mended: Loss | None = None) -> Shape:
    other = None if mended is None else TaskOf(mlp, mended)
    return Shape(name, table, TaskOf(mlp, loss), remedy, other)


SHAPES = (
    shape("cross entropy", cross_entropy),
    shape("label smoothing", label_smoothing),
    shape("class weights", class_weights, MEAN, class_weights_mean),
    shape("class weights with label smoothing", smooth_weights, MEAN, smooth_weights_mean),
    shape("`ignore_index`", ignore_index, MEAN, ignore_index_mean),
    shape("focal loss, mean", focal),
    shape("focal loss / positives", focal_by_positives, MEAN, focal_by_positives_mean),
    shape("binary cross entropy with `pos_weight`", bce_pos_weight),
    shape("sum / constant", sum_by_constant, GATHER, sum_by_constant_gathered),
    shape("weights of samples", weights_of_samples, MEAN, weights_of_samples_mean),
    shape("hard example mining (OHEM)", hardest_samples, GATHER, hardest_samples_gathered),
    shape("worst group (group DRO)", worst_group, GATHER, worst_group_gathered),
    shape("entropy of the mean prediction", entropy_of_mean, GATHER, entropy_of_mean_gathered),
    shape("normalized advantages (PPO)", policy_gradient, GATHER, policy_gradient_gathered),
    Shape("knowledge distillation", table, TaskOf(Student, distillation)),
    shape("KL divergence, `batchmean`", kl_batchmean),
    shape("mixup within a batch", mixup)._replace(draws=True),
    Shape(
        "noise on the inputs", table, TaskOf(mlp, noisy_inputs),
        DRAWN, TaskOf(mlp, noisy_inputs_drawn), with_noise(table, (4,)), draws=True,
    ),
)  # fmt: skip
