"""Losses that compare samples."""

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep

from .base import GATHER, Loss, Shape, TaskOf, mlp, numbers, two_views


def all_of(*tensors: Tensor) -> list[Tensor]:
    return [samestep.gather_batch(tensor) for tensor in tensors]


def ranking_of(scores: Tensor, targets: Tensor) -> Tensor:
    """All pairs of a batch: the score of the larger target must be larger."""
    is_larger = targets[:, None] > targets[None]
    differences = scores[:, None] - scores[None]
    return F.softplus(-differences)[is_larger].mean()


def ranking(net: Any, batch: Any) -> Tensor:
    x, targets = batch
    return ranking_of(net(x)[:, 0], targets)


def ranking_gathered(net: Any, batch: Any) -> Tensor:
    x, targets = batch
    return ranking_of(*all_of(net(x)[:, 0], targets))


def hardest_triplets_of(embeddings: Tensor, y: Tensor) -> Tensor:
    """Batch-hard triplets (Hermans et al. 2017)."""
    distances = (embeddings[:, None] - embeddings[None]).square().sum(2)
    is_same = y[:, None] == y[None]
    farthest = torch.where(is_same, distances, 0).amax(1)
    nearest = torch.where(is_same, torch.inf, distances).amin(1)
    return F.relu(farthest - nearest.clamp(max=100) + 1).mean()


def hardest_triplets(net: Any, batch: Any) -> Tensor:
    x, _, y = batch
    return hardest_triplets_of(F.normalize(net(x)), y)


def hardest_triplets_gathered(net: Any, batch: Any) -> Tensor:
    x, _, y = batch
    return hardest_triplets_of(*all_of(F.normalize(net(x)), y))


def given_triplets(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return F.triplet_margin_loss(net(a), net(b), net(-a))


def info_nce_of(a: Tensor, b: Tensor) -> Tensor:
    """NT-Xent of SimCLR: of two views, all others of the batch are negatives."""
    both = F.normalize(torch.cat([a, b]))
    similarities = both @ both.T / 0.5
    itself = torch.eye(len(both), dtype=torch.bool)
    partner = torch.arange(len(both)).roll(len(a))
    return F.cross_entropy(similarities.masked_fill(itself, -torch.inf), partner)


def info_nce(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return info_nce_of(net(a), net(b))


def info_nce_gathered(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return info_nce_of(*all_of(net(a), net(b)))


class Towers(nn.Module):
    """CLIP: an encoder for each side, and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(), mlp()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(images)), F.normalize(self.text(texts))


def clip_of(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits = scale.exp() * a @ b.T
    targets = torch.arange(len(a))
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def clip(net: Any, batch: Any) -> Tensor:
    images, texts, _ = batch
    return clip_of(*net(images, texts), net.scale)


def clip_gathered(net: Any, batch: Any) -> Tensor:
    images, texts, _ = batch
    return clip_of(*all_of(*net(images, texts)), net.scale)


def sig_lip_of(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits = scale.exp() * a @ b.T
    signs = 2 * torch.eye(len(a), dtype=a.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(a)


def sig_lip(net: Any, batch: Any) -> Tensor:
    images, texts, _ = batch
    return sig_lip_of(*net(images, texts), net.scale)


def sig_lip_gathered(net: Any, batch: Any) -> Tensor:
    images, texts, _ = batch
    return sig_lip_of(*all_of(*net(images, texts)), net.scale)


def sup_con_of(embeddings: Tensor, y: Tensor) -> Tensor:
    """Supervised contrastive (Khosla et al. 2020), with one view."""
    e = F.normalize(embeddings)
    itself = torch.eye(len(e), dtype=torch.bool)
    logs = (e @ e.T / 0.5).masked_fill(itself, -torch.inf).log_softmax(1)
    positives = (y[:, None] == y[None]) & ~itself
    sums = torch.where(positives, logs, 0).sum(1)
    counts = positives.sum(1)
    return -(sums / counts.clamp(min=1))[counts > 0].mean()


def sup_con(net: Any, batch: Any) -> Tensor:
    x, _, y = batch
    return sup_con_of(net(x), y)


def sup_con_gathered(net: Any, batch: Any) -> Tensor:
    x, _, y = batch
    return sup_con_of(*all_of(net(x), y))


def barlow_twins_of(a: Tensor, b: Tensor) -> Tensor:
    a, b = [(view - view.mean(0)) / view.std(0) for view in (a, b)]
    correlations = a.T @ b / len(a)
    wanted = torch.eye(len(correlations), dtype=a.dtype)
    return (correlations - wanted).square().sum()


def barlow_twins(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return barlow_twins_of(net(a), net(b))


def barlow_twins_gathered(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return barlow_twins_of(*all_of(net(a), net(b)))


def vic_reg_of(a: Tensor, b: Tensor) -> Tensor:
    loss = 5 * F.mse_loss(a, b)
    for view in (a, b):
        loss = loss + F.relu(1 - (view.var(0) + 1e-4).sqrt()).mean()
        others = view.T.cov() * (1 - torch.eye(view.shape[1], dtype=view.dtype))
        loss = loss + others.square().sum() / view.shape[1]
    return loss


def vic_reg(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return vic_reg_of(net(a), net(b))


def vic_reg_gathered(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return vic_reg_of(*all_of(net(a), net(b)))


def sim_siam(net: Any, batch: Any) -> Tensor:
    a, b, _ = batch
    return -F.cosine_similarity(net(a), net(b).detach()).mean()


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.centers = mlp(), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.net(x)) @ F.normalize(self.centers).T


def arc_face(net: Any, batch: Any) -> Tensor:
    x, _, y = batch
    angles = net(x).clamp(-0.999, 0.999).acos()
    logits = 4 * (angles + 0.2 * F.one_hot(y, 3)).cos()
    return F.cross_entropy(logits, y)


def mmd_of(a: Tensor, b: Tensor) -> Tensor:
    """Maximum mean discrepancy of two domains, with a Gaussian kernel."""
    kernels = []
    for left, right in ((a, a), (b, b), (a, b)):
        kernels.append((-(left[:, None] - right[None]).square().sum(2)).exp().mean())
    return kernels[0] + kernels[1] - 2 * kernels[2]


def mmd(net: Any, batch: Any) -> Tensor:
    a, b, y = batch
    source = net(a)
    return F.cross_entropy(source, y) + mmd_of(source, net(2 * b))


def mmd_gathered(net: Any, batch: Any) -> Tensor:
    a, b, y = batch
    source = net(a)
    return F.cross_entropy(source, y) + mmd_of(*all_of(source, net(2 * b)))


class Moco(L.LightningModule):
    """Momentum contrast: the negatives are in a queue, which each step extends by its keys."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers
        self.net = mlp()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(40, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b, _ = batch
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = F.normalize(self.slow(b))
        queries = F.normalize(self.net(a))
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.T], 1)
        loss = F.cross_entropy(logits / 0.5, torch.zeros(len(a), dtype=torch.long))
        if self.gathers:
            keys = samestep.gather_batch(keys)
        self.queue = torch.cat([keys, self.queue])[:40]
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Dino(L.LightningModule):
    """A teacher whose outputs are centered by a running mean."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self.gathers = gathers
        self.net = mlp()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b, _ = batch
        outputs = self.teacher(b)
        targets = ((outputs - self.center) / 0.1).softmax(1)
        loss = -(targets * self.net(a).log_softmax(1)).sum(1).mean()
        if self.gathers:
            outputs = samestep.gather_batch(outputs)
        self.center = 0.9 * self.center + 0.1 * outputs.mean(0)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def shape(
    name: str,
    loss: Loss,
    mended: Loss | None = None,
    net: Callable[[], nn.Module] = mlp,
) -> Shape:
    if mended is None:
        return Shape(name, two_views, TaskOf(net, loss))
    return Shape(name, two_views, TaskOf(net, loss), GATHER, TaskOf(net, mended))


SHAPES = (
    Shape("pairwise ranking", numbers, TaskOf(mlp, ranking), GATHER, TaskOf(mlp, ranking_gathered)),
    shape("triplets mined in the batch", hardest_triplets, hardest_triplets_gathered),
    shape("triplets of the data set", given_triplets),
    shape("InfoNCE, SimCLR", info_nce, info_nce_gathered),
    shape("CLIP", clip, clip_gathered, Towers),
    shape("SigLIP", sig_lip, sig_lip_gathered, Towers),
    shape("supervised contrastive", sup_con, sup_con_gathered),
    shape("Barlow Twins", barlow_twins, barlow_twins_gathered),
    shape("VICReg", vic_reg, vic_reg_gathered),
    shape("SimSiam, BYOL", sim_siam),
    shape("ArcFace", arc_face, None, ArcFace),
    shape("maximum mean discrepancy", mmd, mmd_gathered),
    Shape("MoCo: a queue of keys", two_views, lambda: Moco(False), GATHER, lambda: Moco(True)),
    Shape("DINO: a running center", two_views, lambda: Dino(False), GATHER, lambda: Dino(True)),
)
