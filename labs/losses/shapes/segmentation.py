"""Losses of masks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

from .base import GATHER, MEAN, NUM_SAMPLES, Loss, Shape, TaskOf, normal


def masks() -> TensorDataset:
    """Images ``[1, 5, 5]``, and which of their pixels are bright."""
    images = normal(NUM_SAMPLES, 1, 5, 5)
    return TensorDataset(images, (images > 0.7).double())


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 1, 1))


def dice(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    p = net(images).sigmoid()
    return 1 - (2 * (p * targets).sum() + 1) / (p.sum() + targets.sum() + 1)


def dice_gathered(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    # The constant of 1 belongs to sums over the whole batch, which a mean does not have.
    p, targets = map(samestep.gather_batch, (net(images).sigmoid(), targets))
    return 1 - (2 * (p * targets).sum() + 1) / (p.sum() + targets.sum() + 1)


def dice_of_images(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    p = net(images).sigmoid().flatten(1)
    targets = targets.flatten(1)
    overlap = 2 * (p * targets).sum(1) + 1
    return (1 - overlap / (p.sum(1) + targets.sum(1) + 1)).mean()


def tversky(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    p = net(images).sigmoid()
    hits, extra, missed = (p * targets).sum(), (p * (1 - targets)).sum(), ((1 - p) * targets).sum()
    return 1 - hits / (hits + 0.3 * extra + 0.7 * missed)


def tversky_mean(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    p = net(images).sigmoid()
    hits = samestep.mean(p * targets)
    extra, missed = samestep.mean(p * (1 - targets)), samestep.mean((1 - p) * targets)
    return 1 - hits / (hits + 0.3 * extra + 0.7 * missed)


def jaccard(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    p = net(images).sigmoid()
    overlap = (p * targets).sum()
    return 1 - overlap / (p.sum() + targets.sum() - overlap)


def jaccard_mean(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    p = net(images).sigmoid()
    overlap = samestep.mean(p * targets)
    return 1 - overlap / (samestep.mean(p) + samestep.mean(targets) - overlap)


def lovasz_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The Lovasz hinge over all pixels of a batch (Berman et al. 2018)."""
    logits, targets = logits.flatten(), targets.flatten()
    errors, order = (1 - logits * (2 * targets - 1)).sort(descending=True)
    found = targets[order]
    union = found.sum() + (1 - found).cumsum(0)
    steps = 1 - (found.sum() - found.cumsum(0)) / union
    slopes = torch.cat([steps[:1], steps[1:] - steps[:-1]])
    return (F.relu(errors) * slopes).sum()


def lovasz(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    return lovasz_of(net(images), targets)


def lovasz_gathered(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    return lovasz_of(samestep.gather_batch(net(images)), samestep.gather_batch(targets))


def void_pixels(net: Any, batch: Any) -> Tensor:
    """Pixels without a label do not count."""
    images, targets = batch
    losses = F.binary_cross_entropy_with_logits(net(images), targets, reduction="none")
    is_known = images.abs() > 0.4
    return losses[is_known].mean()


def void_pixels_mean(net: Any, batch: Any) -> Tensor:
    images, targets = batch
    losses = F.binary_cross_entropy_with_logits(net(images), targets, reduction="none")
    return samestep.mean(losses, images.abs() > 0.4)


def shape(name: str, loss: Loss, remedy: str = "", mended: Loss | None = None) -> Shape:
    other = None if mended is None else TaskOf(conv, mended)
    return Shape(name, masks, TaskOf(conv, loss), remedy, other)


SHAPES = (
    shape("Dice over the batch", dice, GATHER, dice_gathered),
    shape("Dice of each image", dice_of_images),
    shape("Tversky over the batch", tversky, MEAN, tversky_mean),
    shape("Jaccard (IoU) over the batch", jaccard, MEAN, jaccard_mean),
    shape("Lovasz hinge over the batch", lovasz, GATHER, lovasz_gathered),
    shape("pixels without a label", void_pixels, MEAN, void_pixels_mean),
)
