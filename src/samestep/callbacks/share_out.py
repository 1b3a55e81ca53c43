"""Gives each rank its slice of every batch, and lets the slices count by their length."""

from collections.abc import Iterator
from typing import Any

import lightning as L
from torch import Tensor

from samestep.data.loader import BatchLoader
from samestep.data.sampler import BatchesOfRank, GlobalBatchSampler
from samestep.errors import ConfigError
from samestep.ranks import environment, lightning_patches


class ShareOut(L.Callback):
    """Makes the gradient of a step the mean over all of its samples, however they were shared out.

    A model returns the mean loss of its slice. DDP takes the mean of the ranks' gradients, so a
    sample of a short slice would count more than a sample of a long one. This callback multiplies
    the gradient of the loss by ``len(slice) * ranks / len(global batch)`` before it flows back. The
    gradients of all parameters are linear in it, so this holds for clipping, mixed precision and
    every strategy. It is done in each backward pass: where gradients are accumulated, the slices of
    a step may have different lengths. A communication hook of DDP could not do that, because it
    sees only the sum of the step.

    If all slices are equal, nothing is multiplied.
    """

    def __init__(self) -> None:
        self.shares: tuple[float, ...] | None = None
        """How much each rank gets, in any unit; None: all the same. ``shares.decide`` sets it."""
        self._order: GlobalBatchSampler | None = None  # of the training data, if weights are needed
        self._batch = 0  # of this epoch
        self._has_patched = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let batch samplers give each rank a part of their batches."""
        if trainer.world_size > 1 and not self._has_patched:
            lightning_patches.share_out_batch_samplers(trainer, share_batches)
            self._has_patched = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Cut the training data, and find out whether weights are needed.

        Raises:
            ConfigError: if a rank would get no sample of some batch, or if shares are unequal and
                the data come from an ordinary DataLoader, which cannot be cut.
        """
        order = order_of(trainer)
        if order is None:
            if self.shares and len(set(self.shares)) > 1:
                raise ConfigError(NEEDS_BATCH_LOADER, on_all_ranks=True)
            return
        self._set_shares(trainer.train_dataloader)
        orders = [loader.order for loader in find_batch_loaders(trainer.train_dataloader)]
        if any(each.has_empty_slices() for each in orders):
            raise ConfigError(
                f"the training data: a batch has fewer samples than {trainer.world_size} ranks; "
                "use a larger batch or fewer ranks, or leave out a short last batch by "
                "BatchLoader(drop_last=True)",
                on_all_ranks=True,
            )
        has_equal_slices = all(each.has_equal_slices() for each in orders)
        if len(orders) > 1 and not has_equal_slices:
            raise ConfigError(
                "the training data: several BatchLoaders need slices of equal length; let each "
                f"batch_size divide by {trainer.world_size} ranks x "
                f"{trainer.accumulate_grad_batches} accumulated batches, with drop_last=True and "
                "cluster.shares=equal",
                on_all_ranks=True,
            )
        self._order = None if has_equal_slices else order

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember which batch this is."""
        self._batch = batch_idx

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Weight this slice."""
        if self._order is None:
            return
        weight = self._order.weight(self._batch)
        if weight != 1:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Cut the validation data; sums of metrics need no weights."""
        self._set_shares(trainer.val_dataloaders)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Cut the test data."""
        self._set_shares(trainer.test_dataloaders)

    def _set_shares(self, loaders: Any) -> None:
        for loader in find_batch_loaders(loaders):
            if self.shares:
                loader.order.shares = self.shares


NEEDS_BATCH_LOADER = (
    "cluster.shares: an ordinary DataLoader gives every rank the same share; use "
    "samestep.data.loader.BatchLoader (docs/contract.md), or cluster.shares=equal"
)


def share_batches(batch_sampler: Any) -> Any:
    """This rank's part of a batch sampler; one that knows of the ranks gives it already."""
    parts = [batch_sampler, getattr(batch_sampler, "sampler", None)]
    if any(hasattr(part, "num_replicas") or hasattr(part, "world_size") for part in parts):
        return batch_sampler
    return BatchesOfRank(batch_sampler, environment.rank(), environment.world_size())


def order_of(trainer: L.Trainer) -> GlobalBatchSampler | None:
    """How the training data are cut; None if some come from an ordinary DataLoader.

    If there are several loaders, their slices are equally long, and one order stands for all.
    """
    loaders = list(find_loaders(trainer.train_dataloader))
    orders = [loader.order for loader in loaders if isinstance(loader, BatchLoader)]
    return orders[0] if orders and len(orders) == len(loaders) else None


def weights_of_ranks(trainer: L.Trainer) -> list[float]:
    """What each rank counts for in a mean over the ranks; 1 on average."""
    order = order_of(trainer)
    return order.weights_of_ranks() if order else [1.0] * trainer.world_size


def find_batch_loaders(loaders: Any) -> Iterator[BatchLoader]:
    """Each BatchLoader among the loaders of a stage."""
    return (loader for loader in find_loaders(loaders) if isinstance(loader, BatchLoader))


def find_loaders(loaders: Any) -> Iterator[Any]:
    """Each loader of a stage, which has one, or several in lists and dictionaries."""
    if isinstance(loaders, (list, tuple, dict)):
        for part in loaders.values() if isinstance(loaders, dict) else loaders:
            yield from find_loaders(part)
    else:
        yield loaders
