"""The loaders of a stage, and how training loaders cut each batch into slices."""

from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities import CombinedLoader

from samestep.data.sampler import ExactLoader, GlobalBatchSampler, SplitBatches
from samestep.data.torch_loaders import split_of
from samestep.ranks import virtual


def find_loaders(loaders: Any) -> Iterator[Any]:
    """Each loader of a stage, which has one, or several in lists and dictionaries."""
    # Lightning's own way to flatten them, so that no container is missed.
    return iter(CombinedLoader(loaders).flattened)


def find_batch_loaders(loaders: Any) -> Iterator[ExactLoader]:
    """Each loader of slices, such as a BatchLoader, among the loaders of a stage."""
    for loader in find_loaders(loaders):
        if isinstance(loader, ExactLoader):
            yield loader


def without_states(loaders: Iterable[Any]) -> list[Any]:
    """The loaders that do not continue from a state of their own, as torchdata's and litdata's."""
    return [loader for loader in loaders if not hasattr(loader, "load_state_dict")]


def orders_of(trainer: L.Trainer) -> list[GlobalBatchSampler | SplitBatches | None]:
    """How each training loader is cut into slices; None if Lightning distributes it."""
    orders: list[GlobalBatchSampler | SplitBatches | None] = []
    for loader in find_loaders(trainer.train_dataloader):
        orders.append(order_of_loader(loader))
    return orders


def order_of_loader(loader: Any) -> GlobalBatchSampler | SplitBatches | None:
    """How a loader is cut into slices; None if Lightning distributes it."""
    return loader.order if isinstance(loader, ExactLoader) else split_of(loader)


def order_of(trainer: L.Trainer) -> GlobalBatchSampler | SplitBatches | None:
    """How the training data are cut into slices; None if Lightning distributes some of them.

    If there are several loaders, their slices are equally long, and one order stands for all.
    """
    orders = orders_of(trainer)
    # If Lightning distributes one loader over the ranks, the batches have no common slices.
    return None if None in orders else orders[0]


def weights_of_slices(trainer: L.Trainer) -> list[float]:
    """The weight of each slice in a mean over all slices; 1 on average."""
    order = order_of(trainer)
    if order is None:
        return [1.0] * virtual.layout().total
    return order.weights_of_ranks()
