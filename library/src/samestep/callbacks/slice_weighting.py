"""Gives each rank its slice of every batch, and lets the slices count by their length."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from samestep.callbacks.clock import synchronized_time
from samestep.data.loaders import find_batch_loaders, find_loaders, order_of
from samestep.data.sampler import BatchesOfRank, GlobalBatchSampler, SplitBatches
from samestep.data.torch_loaders import has_batches_of_ids, split_of
from samestep.errors import ConfigError
from samestep.option_names import option, setting
from samestep.ranks import compat, environment, process_group

WARMUP_BATCHES = 3  # of an epoch; they are not timed
TIMED_BATCHES = 100  # of an epoch, at most: a GPU is waited for in each of them
ALIKE = 1.1  # ranks whose speeds differ by this factor at most keep the shares that they have


class SliceWeighting(L.Callback):
    """Makes the gradient of a step the mean over all of its samples, however they were shared out.

    A model returns the mean loss of its slice. DDP takes the mean of the ranks' gradients, so a
    sample of a short slice would count more than a sample of a long one. This callback multiplies
    the gradient of the loss by ``len(slice) * ranks / len(global batch)`` before it flows back,
    which holds for clipping, mixed precision and every strategy. It is done in each backward pass:
    where gradients are accumulated, the slices of a step may have different lengths. A
    communication hook of DDP could not do that, because it sees only the sum of the step.

    If all slices are equal, nothing is multiplied.

    With ``split_batches`` each batch of an ordinary DataLoader is cut into such slices too, if it
    asks a map-style data set for batches, in training, validation and test.

    With ``auto`` the first epoch has equal shares. The forward passes of each epoch are timed, and
    at its end the ranks agree on the shares of the next one. A checkpoint keeps them: a run that
    continues on as many ranks begins with them. Shares change neither the global
    batches nor the loss curve. They only let a slow rank have less to do, so that the others need
    not wait for it.

    Args:
        asked: ``equal``, ``auto``, or numbers in any unit, one for each rank or each node.
        split_batches: whether ``batch_size`` of ordinary DataLoaders counts samples over all ranks.
        seed: of batch samplers that draw random numbers in validation and test.
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
        self.shares: tuple[float, ...] | None = None
        """How much each rank gets; None: all the same."""
        # Of the training data, if weights are needed.
        self._order: GlobalBatchSampler | SplitBatches | None = None
        self._splits: list[SplitBatches] = []  # of the ordinary loaders of the training
        self._checked_epoch = -1
        self._batch = 0  # of this epoch
        self._saved: tuple[float, ...] = ()  # the shares of a checkpoint
        self._begin: float | None = None  # of a forward pass that is timed
        self._seconds, self._samples = 0.0, 0  # of the forward passes of this epoch
        self._has_patched = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let batch samplers give each rank a part of their batches."""
        if (trainer.world_size > 1 or self.split_batches) and not self._has_patched:
            compat.replace_batch_samplers(trainer, self._share)
            self._has_patched = True

    def _share(self, loader: DataLoader[Any], stage: str) -> Any:
        """The batch sampler of this rank; None leaves the loader to Lightning."""
        batches: Any = loader.batch_sampler
        parts = [batches, getattr(batches, "sampler", None)]
        knows_ranks = any(hasattr(p, "num_replicas") or hasattr(p, "world_size") for p in parts)
        is_own = loader.batch_size is None and batches is not None  # otherwise torch has made it
        if knows_ranks:
            return batches if is_own else None
        rank, world_size = environment.rank(), environment.world_size()
        if self.split_batches and stage != "predict" and has_batches_of_ids(loader):
            # ``ResumableBatches`` seeds the batches of the training.
            seed = None if stage == "train" else self.seed
            return SplitBatches(batches, rank, world_size, seed)
        return BatchesOfRank(batches, rank, world_size) if is_own and world_size > 1 else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the shares, cut the training data, and find out whether weights are needed."""
        # Each node may have a command of its own; that of rank zero counts.
        asked = process_group.broadcast(self.asked)
        if environment.world_size() > 1 and asked != "equal" and len(set(asked)) > 1:
            loaders = list(find_batch_loaders(trainer.train_dataloader))
            if len(loaders) != 1 or not order_of(trainer):
                raise needs_batch_loader()
            self.asked = asked
            if asked != "auto":
                self.shares = tuple(by_rank([float(share) for share in asked]))
            elif len(self._saved) == environment.world_size():
                self.shares = self._saved
        self._cut(trainer)

    def _cut(self, trainer: L.Trainer) -> None:
        splits = map(split_of, find_loaders(trainer.train_dataloader))
        self._splits = [one for one in splits if one is not None]
        order = order_of(trainer)
        if order is None:
            return
        self._set_shares(trainer.train_dataloader)
        orders = [loader.order for loader in find_batch_loaders(trainer.train_dataloader)]
        if not orders and len(self._splits) == 1:
            self._order = order
            return
        if any(each.has_empty_slices() for each in orders):
            raise ConfigError(
                f"the training data: a batch has fewer samples than {trainer.world_size} ranks; "
                "use a larger batch or fewer ranks, or leave out a short last batch by "
                "BatchLoader(drop_last=True)"
            )
        has_equal_slices = all(each.has_equal_slices() for each in orders)
        if len(orders) + len(self._splits) > 1 and not has_equal_slices:
            raise ConfigError(
                "the training data: several BatchLoaders need slices of equal length; let each "
                f"batch_size divide by {trainer.world_size} ranks x "
                f"{trainer.accumulate_grad_batches} accumulated batches, with drop_last=True and "
                f"{setting('shares', 'equal')}"
            )
        self._order = None if has_equal_slices else order

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember which batch this is, and when its forward pass began."""
        self._batch = batch_idx
        if self._splits:
            self._check_splits(trainer)
        # The first batches of an epoch also start loader processes and choose kernels.
        if self.asked == "auto" and WARMUP_BATCHES <= batch_idx < WARMUP_BATCHES + TIMED_BATCHES:
            self._begin = synchronized_time(pl_module)

    def _check_splits(self, trainer: L.Trainer) -> None:
        if trainer.current_epoch != self._checked_epoch:
            self._checked_epoch = trainer.current_epoch
            of_ranks = process_group.gather([one.digest for one in self._splits])
            if any(digests != of_ranks[0] for digests in of_ranks):
                raise ConfigError(
                    "split_batches: the ranks have drawn different batches, which cannot be split; "
                    "seed the generator of the sampler alike on all ranks"
                )
        if self._order is None and any(one.is_unequal for one in self._splits):
            raise ConfigError(
                "split_batches: several loaders need slices of equal length; let each batch_size "
                f"divide by {trainer.world_size} ranks, with drop_last=True"
            )

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Weight this slice."""
        if self._begin is not None and isinstance(order := order_of(trainer), GlobalBatchSampler):
            self._seconds += synchronized_time(pl_module) - self._begin
            self._samples += order.lengths(self._batch)[order.rank]
            self._begin = None
        if self._order is None:
            return
        weight = self._order.weight(self._batch)
        # The gradients of all parameters are linear in that of the loss.
        if weight != 1:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Agree on the shares of the next epoch, if the ranks are measured."""
        if self.asked != "auto" or environment.world_size() == 1:
            return
        speeds = process_group.gather(self._samples / self._seconds if self._seconds else 0.0)
        self._seconds, self._samples = 0.0, 0
        before = self.shares or (1.0,) * len(speeds)
        if min(speeds) <= 0:
            return  # an epoch of a few batches
        # What a rank would take for its share, if it had the whole batch: all alike, or not.
        times = [share / speed for share, speed in zip(before, speeds, strict=True)]
        if max(times) <= ALIKE * min(times):
            return
        self.shares = tuple(round(speed / min(speeds), 2) for speed in speeds)
        self._cut(trainer)
        if trainer.is_global_zero:
            shown = ", ".join(f"{share:g}" for share in self.shares)
            print(f"Shares of the ranks: {shown} (measured in epoch {trainer.current_epoch + 1})")

    def state_dict(self) -> dict[str, Any]:
        """The shares that were measured."""
        return {"shares": list(self.shares or ())} if self.asked == "auto" else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin with them, if there are as many ranks."""
        self._saved = tuple(state_dict.get("shares", ()))

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


def needs_batch_loader() -> ConfigError:
    """The error of data that cannot be split into unequal slices."""
    return ConfigError(
        f"{option('shares')}: an ordinary DataLoader, or several loaders, give every rank the same "
        "share; use one samestep.data.loader.BatchLoader (docs/contract.md), or "
        f"{setting('shares', 'equal')}"
    )


def by_rank(shares: Sequence[float]) -> list[float]:
    """One share for each rank; shares of nodes are those of each of their ranks."""
    if len(shares) == environment.world_size():
        return list(shares)
    return [shares[node] for node in process_group.gather(environment.node_rank())]
