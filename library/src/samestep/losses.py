"""What a loss must be so that any number of ranks takes the same step.

Each rank computes the loss of its slice of a batch. The gradient of a step is the sum of the
gradients of these losses, each times the share of its slice (``SliceWeighting``). If the loss is
the mean over the samples of its slice, that sum is the gradient of the whole batch. It is not if

- the loss has another denominator: class weights, ``ignore_index``, a mask, tokens;
- the loss compares samples, or is a function of their mean: contrastive, Dice, RMSE.

``mean`` and ``gather_batch`` give each rank what only the whole batch has. Their gradients flow
back to the rank whose samples they are of.

Source of the gradient of a gathered batch: Chen et al., "A Simple Framework for Contrastive
Learning of Visual Representations" (2020), whose loss compares all samples of all devices.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from samestep.errors import ConfigError
from samestep.ranks import collectives, process_group


class Peers(Protocol):
    """Those that have the other slices of a batch; each must call these at the same point."""

    def total(self, own: Tensor) -> Tensor:
        """The sum of what all of them have."""

    def slices(self, own: Tensor) -> list[Tensor]:
        """What each of them has; the slices may differ in their first dimension."""

    @property
    def index(self) -> int:
        """The place of our slice among them."""


class Ranks:
    """The ranks of the process group."""

    @property
    def index(self) -> int:
        """The rank."""
        return dist.get_rank()

    def total(self, own: Tensor) -> Tensor:
        """The sum over all ranks, by one all-reduce."""
        return collectives.all_reduce(own.detach().clone())

    def slices(self, own: Tensor) -> list[Tensor]:
        """The slices of all ranks, by rank.

        Raises:
            ConfigError: if they differ in more than their length.
        """
        shapes = process_group.gather(tuple(own.shape))
        if len({shape[1:] for shape in shapes}) > 1:
            raise ConfigError(
                f"samestep.gather_batch: the slices have the shapes {', '.join(map(str, shapes))}; "
                "only the first dimension may differ: pad the others to a length that does not "
                "depend on the slice"
            )
        # Ranks can only exchange tensors of equal shape.
        longest = max(shape[0] for shape in shapes)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: len(own)] = own.detach()
        gathered = collectives.all_gather(padded)
        return [slice_[: shape[0]] for slice_, shape in zip(gathered, shapes, strict=True)]


@dataclass
class Batch:
    """The batch that is trained on, or evaluated."""

    peers: Peers | None = None
    """None: the ranks of the process group, if there is one."""
    is_alone: bool = False
    """Whether other ranks may not have a batch at this moment."""
    counts: bool = True
    """Whether the samples of our slice are ours: one that would be empty repeats a sample."""
    is_shared: bool = False
    """Whether ``mean`` or ``gather_batch`` was called for it."""

    def find_peers(self) -> Peers | None:
        """The peers; None if there are none."""
        self.is_shared = True
        if self.peers is not None:
            return self.peers
        has_ranks = collectives.num_ranks() > 1
        return Ranks() if has_ranks and not self.is_alone else None


_batch = Batch()


def begin_batch(**facts: Any) -> Batch:
    """Let ``mean`` and ``gather_batch`` be of this batch from now on; see ``Batch``."""
    global _batch
    _batch = Batch(**facts)
    return _batch


class _Total(torch.autograd.Function):
    """The sum over all slices. The gradient of a sum is that of all its users, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.total(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.total(gradient), None


class _Gathered(torch.autograd.Function):
    """All slices in order. The gradient of a sample is that of all its users, on every rank."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, peers: Peers) -> Tensor:
        slices = peers.slices(own)
        lengths = [len(slice_) for slice_ in slices]
        ctx.peers = peers
        ctx.start, ctx.length = sum(lengths[: peers.index]), len(own)
        return torch.cat(slices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = ctx.peers.total(gradient.contiguous())
        return total[ctx.start : ctx.start + ctx.length], None


# Collective operations on numbers that change from step to step cannot be compiled into a graph.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """The mean over all samples of a batch, on all ranks, with the gradient of it.

    It has the same value on every rank, so ``self.log`` and functions of it, such as ``sqrt``, are
    those of the whole batch too. Every rank must call it equally often in each step. With several
    ranks it takes an all-reduce of two numbers, and another one in the backward pass.

    With ``accumulate_grad_batches`` it is the mean over each batch, which counts by its samples.

    Outside a run of ``samestep.Trainer`` it is the mean over the ranks of the process group.

    Args:
        values: losses, one for each sample, token or place: floating point, any shape.
        weights: of each value, such as a mask, class weights, or 0 where there is no target; of a
            shape that can be broadcast to that of ``values``. None: each counts once.

    Returns:
        ``sum(weights * values) / sum(weights)`` without dimensions, float32 or float64; 0, with a
        gradient of 0, if all weights are 0. A value whose weight is 0 may be nan.

    Raises:
        ConfigError: if the shapes do not fit, or ``values`` are no floating point numbers.

    Example:
        ``F.cross_entropy(logits, targets, weight=w)``, on any number of ranks::

            losses = F.cross_entropy(logits, targets, reduction="none")
            loss = samestep.mean(losses, w[targets])
    """
    check_values(values, weights)
    dtype = torch.promote_types(values.dtype, torch.float32)
    values = values.to(dtype)
    if weights is None:
        weighted = values
        denominator = torch.tensor(float(values.numel()), dtype=dtype, device=values.device)
    else:
        scales = weights.to(dtype).broadcast_to(values.shape)
        # Not by the product alone, because 0 * nan is nan.
        weighted = torch.where(scales == 0, 0.0, values * scales)
        denominator = scales.sum()
    sums = torch.stack([weighted.sum(), denominator])
    # Counts of tokens are exact in 64 bits only, which Apple's GPUs do not have.
    if sums.device.type != "mps":
        sums = sums.double()
    if not _batch.counts:
        sums = sums * 0
    peers = _batch.find_peers()
    if peers is not None:
        sums = _Total.apply(sums, peers)
    numerator, denominator = sums
    is_empty = denominator == 0
    value: Tensor = (numerator / torch.where(is_empty, 1.0, denominator)).to(dtype)
    return value


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_batch(tensor: Tensor) -> Tensor:
    """The whole batch of a tensor of which each rank has its slice, with the gradient of it.

    For losses that compare samples. Every rank must call it equally often in each step. The
    gradient of the loss flows back to the rank that has the sample, whether each rank computes the
    loss of the whole batch, or compares its own slice with it. It exchanges the
    shapes and the slices, and takes an all-reduce of the whole batch in the backward pass.

    Args:
        tensor: ``[B, ...]``, the samples of this rank; lengths may differ between ranks, other
            dimensions may not.

    Returns:
        ``[sum of all B, ...]``, the samples in the order of the batch, on every rank the same.

    Raises:
        ConfigError: if the shapes of the ranks do not fit.

    Example:
        InfoNCE with all samples of all ranks as negatives::

            a, b = samestep.gather_batch(a), samestep.gather_batch(b)
            loss = F.cross_entropy(a @ b.T / temperature, torch.arange(len(a), device=a.device))
    """
    if tensor.ndim == 0:
        raise ConfigError(
            "samestep.gather_batch: needs a tensor with samples in its first dimension, and got a "
            "number; use samestep.mean for a loss"
        )
    if not _batch.counts:
        tensor = tensor[:0]
    peers = _batch.find_peers()
    if peers is None:
        return tensor
    gathered: Tensor = _Gathered.apply(tensor, peers)
    return gathered


def check_values(values: Tensor, weights: Tensor | None) -> None:
    """Raise a ConfigError for values that have no mean, or weights of another shape."""
    if not values.is_floating_point():
        raise ConfigError(
            f"samestep.mean: values must be floating point numbers, not {values.dtype}; use "
            "values.float()"
        )
    if weights is None:
        return
    try:
        weights.broadcast_to(values.shape)
    except RuntimeError:
        raise ConfigError(
            f"samestep.mean: weights of shape {tuple(weights.shape)} do not fit values of shape "
            f'{tuple(values.shape)}; losses need reduction="none"'
        ) from None
