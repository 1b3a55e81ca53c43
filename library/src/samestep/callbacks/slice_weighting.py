"""Gives each rank its slice of every batch, and weights the slices by their length."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import DataLoader

from samestep import losses
from samestep.callbacks.notes import print_note
from samestep.callbacks.rank_state import RankState
from samestep.data.loaders import find_batch_loaders, find_loaders, orders_of
from samestep.data.sampler import (
    BatchesOfRank,
    ExactLoader,
    GlobalBatchSampler,
    SplitBatches,
    WrappedBatches,
)
from samestep.data.torch_loaders import has_batches_of_ids
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import environment, process_group, virtual
from samestep.ranks.compat import callbacks_of, of_kind

NOTE_ON_SLICES = (
    "Each step is the mean of {} slices of a batch, on any number of ranks. Each slice has its own "
    "loss, batch norm and random numbers"
)


class SliceWeighting(L.Callback):
    """Makes the gradient of a step the mean over all of its samples, however they are sliced.

    A model returns the mean loss of its slice. DDP takes the mean of the ranks' gradients, so a
    sample of a short slice would count more than a sample of a long one. This callback multiplies
    the gradient of the loss by ``len(slice) * ranks / len(global batch)`` before it flows back,
    which holds for clipping, mixed precision and every strategy. It is done in each backward pass:
    where gradients are accumulated, the slices of a step may have different lengths. A
    communication hook of DDP could not do that, because it sees only the sum of the step.

    If all slices are equal, nothing is multiplied.

    With ``split_batches`` each batch of an ordinary DataLoader is cut into slices too, if it
    asks a map-style data set for batches, in training, validation and test.

    With ``auto`` the first epoch has equal shares. The forward passes of each epoch are timed, and
    at its end the ranks agree on the shares of the next one. A checkpoint keeps them for a run that
    resumes on as many ranks. Shares change neither the global batches nor the loss curve. They
    only give a slow rank less to do, so that the others need not wait for it.

    Args:
        asked: ``equal``, ``auto``, or numbers in any unit, one for each rank or each node.
        split_batches: whether ``batch_size`` of ordinary DataLoaders counts samples over all ranks.
        seed: of batch samplers that sample random numbers in validation and test.
    """

    def __init__(
        self,
        asked: str | Sequence[float] = "equal",
        split_batches: bool = False,
        seed: int = 0,
    ) -> None:
        self.asked = asked
        self.split_batches = split_batches
        self.seed = seed
        self.shares: tuple[float, ...] = ()
        """How much each rank gets; empty: all the same."""
        # Of the training data; None if all slices are equal and need no weights.
        self._order: GlobalBatchSampler | SplitBatches | None = None
        self._splits: list[SplitBatches] = []  # of the ordinary loaders of the training
        self._checked_epoch = -1
        self._batch = 0  # of this epoch
        self._saved: tuple[float, ...] = ()  # the shares of a checkpoint
        self.is_measured = False
        """Whether the shares follow the speeds of the ranks; see ``plugins.measured_shares``."""
        self._has_patched = False
        self._loss: Tensor | None = None  # of the last slice, as they are added up

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let batch samplers give each rank its slice of their batches."""
        if self._has_patched:
            return
        if virtual.layout().total > 1 or self.split_batches:
            replace_batch_samplers(trainer, self._batches_of_rank)
            self._has_patched = True

    def _batches_of_rank(self, loader: DataLoader[Any], stage: str) -> Any:
        """The batch sampler of this rank; None leaves the loader to Lightning."""
        batches: Any = loader.batch_sampler
        # Otherwise torch has made the batch sampler, from batch_size and shuffle.
        of_user = batches if loader.batch_size is None else None
        # A distributed sampler, of torch or of the user, already gives each rank its batches.
        if any(map(knows_ranks, [batches, getattr(batches, "sampler", None)])):
            return of_user
        layout = virtual.layout()
        if stage != "predict" and has_batches_of_ids(loader):
            # To evaluate, virtual ranks split batches too: dealt whole, some would be repeated.
            if self.split_batches or (layout.is_virtual and stage != "train"):
                # ``ResumableBatches`` seeds the batches of the training.
                seed = None if stage == "train" else self.seed
                split = SplitBatches(batches, layout.own, layout.total, seed)
                return WrappedBatches(batches, split)
            if layout.is_virtual:
                return WrappedBatches(batches, BatchesOfRank(batches, layout.own, layout.total))
        if of_user is None or environment.world_size() == 1:
            return None
        # Lightning would reject the user's batch sampler. To predict, each rank has one slice.
        rank, ranks = environment.rank(), environment.world_size()
        return WrappedBatches(of_user, BatchesOfRank(of_user, range(rank, rank + 1), ranks))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the shares, slice the training data, and find out whether weights are needed.

        Raises:
            ConfigError: if the training data cannot have such shares or slices.
        """
        layout = virtual.layout()
        if layout.has_several and not pl_module.automatic_optimization:
            raise ConfigError(
                f"{setting('virtual_ranks', layout.total)}: with manual optimization the module "
                "takes its steps itself, and a rank cannot compute several slices of one; use "
                f"{layout.total} ranks, or leave it out"
            )
        if layout.has_several:
            virtual.reject_within_slices(trainer.strategy)
        if layout.is_virtual and layout.total > 1:
            print_note(trainer, NOTE_ON_SLICES.format(layout.total))
        # Each node may have its own command; the command of rank zero counts.
        asked = process_group.broadcast(self.asked)
        if environment.world_size() > 1 and asked != "equal" and len(set(asked)) > 1:
            self._use_shares(asked, trainer)
        self._slice_training_data(trainer)

    def _use_shares(self, asked: str | Sequence[float], trainer: L.Trainer) -> None:
        if virtual.layout().is_virtual and asked != "auto":
            # They are shares of the slices, which are dealt already.
            return
        order, *others = orders_of(trainer)
        if others or not isinstance(order, GlobalBatchSampler):
            raise ConfigError(
                f"{option('shares')}: an ordinary DataLoader, or several loaders, give every rank "
                "the same share; use one samestep.BatchLoader, or "
                f"{setting('shares', 'equal')}"
            )
        self.asked = asked
        self.is_measured = asked == "auto"
        if not self.is_measured:
            self.shares = tuple(shares_of_ranks(list(map(float, asked))))
        elif len(self._saved) == environment.world_size():
            self.shares = self._saved

    def _slice_training_data(self, trainer: L.Trainer) -> None:
        check_several_slices(trainer.train_dataloader)
        orders = orders_of(trainer)
        self._splits = of_kind(orders, SplitBatches)
        if None in orders:
            return
        self._set_shares(trainer.train_dataloader)
        exact = of_kind(orders, GlobalBatchSampler)
        check_empty_slices(exact, trainer)
        self._order = None
        if not all(map(GlobalBatchSampler.has_equal_slices, exact)):
            check_single_loader(len(orders), trainer)
            self._order = exact[0]
        # The lengths of the batches of a batch sampler are known only when they are read.
        if len(orders) == len(self._splits) == 1:
            self._order = self._splits[0]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember which batch this is, and when its forward pass began."""
        self._batch = batch_idx
        if self._splits:
            self._check_splits(trainer)
        losses.begin_batch(peers=find_peers(), counts=self.weight() > 0)

    def _check_splits(self, trainer: L.Trainer) -> None:
        # Once per epoch: a difference shows in its first batch, and asking the ranks takes time.
        if trainer.current_epoch != self._checked_epoch:
            self._checked_epoch = trainer.current_epoch
            of_ranks = process_group.gather([split.digest for split in self._splits])
            if of_ranks.count(of_ranks[0]) < len(of_ranks):
                raise ConfigError(
                    "split_batches: the ranks have sampled different batches, which cannot be "
                    "split; seed the generator of the sampler alike on all ranks"
                )
        if self._order is None and any(split.is_unequal for split in self._splits):
            raise ConfigError(
                "split_batches: several loaders need slices of equal length; let each batch_size "
                f"divide by {trainer.world_size} ranks, with drop_last=True"
            )

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Weight this slice."""
        weight = self.weight()
        layout = virtual.layout()
        if layout.is_virtual:
            # The tree adds them up.
            weight /= layout.total
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            # 16-mixed has multiplied it by a power of two.
            self._loss = loss.detach() * weight / (scaler.get_scale() if scaler else 1)
        # The gradients of all parameters are linear in the gradient of the loss. A callback cannot
        # replace the loss itself, whose value other callbacks show.
        if weight != 1:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def take_loss(self) -> Tensor | None:
        """The weighted loss of the last slice; None if it has none. With virtual ranks only."""
        loss, self._loss = self._loss, None
        return loss

    def weight(self) -> float:
        """How much this slice counts in the mean over the ranks; 1 if all are equal."""
        return 1.0 if self._order is None else self._order.weight(self._batch)

    def use_shares(self, trainer: L.Trainer, shares: tuple[float, ...]) -> None:
        """Give the ranks these shares, of each batch or of its slices; between two epochs."""
        self.shares = shares
        if virtual.layout().is_virtual:
            (ranks,) = callbacks_of(trainer, RankState)
            ranks.deal(trainer, shares)
        self._slice_training_data(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The shares that were measured."""
        # Shares that were configured are not restored: a new configuration replaces them.
        if self.asked != "auto" or virtual.layout().is_virtual:
            return {}
        return {"shares": list(self.shares)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start with the saved shares, if there are as many ranks."""
        self._saved = tuple(state_dict.get("shares", ()))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Slice the validation data; sums of metrics need no weights."""
        self._begin_evaluation(trainer.val_dataloaders)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Slice the test data."""
        self._begin_evaluation(trainer.test_dataloaders)

    def _begin_evaluation(self, loaders: Any) -> None:
        check_several_slices(loaders)
        self._set_shares(loaders)
        # Of a stream some ranks may have more batches than others, which would wait for them.
        is_stream = any(sized_len(loader) is None for loader in find_loaders(loaders))
        losses.begin_batch(peers=find_peers(), is_alone=is_stream)

    def _set_shares(self, loaders: Any) -> None:
        layout = virtual.layout()
        for loader in find_batch_loaders(loaders):
            loader.order.deal(layout, () if layout.is_virtual else self.shares)


class NoPeers:
    """Rejects what needs all slices of a batch at once: a rank has one after the other."""

    index = 0

    def total(self, own: Tensor) -> Tensor:
        """Raise a ConfigError."""
        raise virtual.needs_all_slices("samestep.mean or samestep.gather_batch")

    def slices(self, own: Tensor) -> list[Tensor]:
        """Raise a ConfigError."""
        return [self.total(own)]


def find_peers() -> NoPeers | None:
    """Those that have the other slices of a batch; None: the ranks."""
    return NoPeers() if virtual.layout().has_several else None


def knows_ranks(sampler: Any) -> bool:
    """Whether a sampler has the number of ranks, as distributed samplers do, or got our plan."""
    if isinstance(sampler, WrappedBatches):
        return True
    return hasattr(sampler, "num_replicas") or hasattr(sampler, "world_size")


def check_empty_slices(orders: list[GlobalBatchSampler], trainer: L.Trainer) -> None:
    """Reject slices without a sample: their mean loss is nan, and no weight can undo that."""
    # A virtual rank without a sample has no gradient.
    if virtual.layout().is_virtual:
        return
    if any(map(GlobalBatchSampler.has_empty_slices, orders)):
        raise ConfigError(
            f"the training data: a batch has fewer samples than {trainer.world_size} ranks; "
            "use a larger batch or fewer ranks, or leave out a short last batch by "
            "BatchLoader(drop_last=True)"
        )


def check_several_slices(loaders: Any) -> None:
    """Reject a loader of which a process cannot have several slices, if it must have them."""
    layout = virtual.layout()
    for loader in find_loaders(loaders) if layout.has_several else ():
        is_cut = isinstance(getattr(loader, "batch_sampler", None), WrappedBatches)
        if not is_cut and not isinstance(loader, ExactLoader):
            raise ConfigError(
                f"{setting('virtual_ranks', layout.total)}: {type(loader).__name__} gives one "
                "batch after the other, which a rank cannot cut into slices; use "
                f"{layout.total} ranks, or a data set with a length"
            )


def check_single_loader(num_loaders: int, trainer: L.Trainer) -> None:
    """Reject several loaders with unequal slices: one loss of them can have one weight only."""
    if num_loaders > 1:
        raise ConfigError(
            "the training data: several BatchLoaders need slices of equal length; let each "
            f"batch_size divide by {trainer.world_size} ranks x "
            f"{trainer.accumulate_grad_batches} accumulated batches, with drop_last=True and "
            f"{setting('shares', 'equal')}"
        )


def given_shares(shares: str | Sequence[float]) -> list[float]:
    """The shares that were asked for, one for each rank; empty: all the same, or measured."""
    return [] if isinstance(shares, str) else shares_of_ranks([*map(float, shares)])


def shares_of_ranks(shares: Sequence[float]) -> list[float]:
    """One share for each rank; the share of a node holds for each of its ranks."""
    if len(shares) == environment.world_size():
        return list(shares)
    return [shares[node] for node in process_group.gather(environment.node_rank())]


def replace_batch_samplers(trainer: L.Trainer, share: Callable[[Any, str], Any]) -> None:
    """Let DataLoaders get another batch sampler when Lightning takes them.

    Lightning 2.6 replaces a ``BatchSampler`` of torch by samples one at a time, without a word. It
    rejects other batch samplers, with the advice of a flag that shares nothing out. ``share`` gets
    a loader and a stage (``train``, ``validate``, ``test``, ``predict``), and returns this rank's
    batch sampler, or None for what Lightning does. Upstream:
    Lightning-AI/pytorch-lightning issue 21122.
    """
    connector = trainer._data_connector
    prepare: Callable[..., Any] = connector._prepare_dataloader

    def prepare_dataloader(dataloader: Any, shuffle: bool, mode: Any) -> Any:
        batches = None
        if isinstance(dataloader, DataLoader):
            batches = share(dataloader, mode.value)
        if batches is None:
            return prepare(dataloader, shuffle, mode)
        # DataLoader raises where this attribute is assigned.
        vars(dataloader)["batch_sampler"] = batches
        return dataloader

    connector._prepare_dataloader = prepare_dataloader  # type: ignore[method-assign]
