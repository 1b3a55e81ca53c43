"""With ``shares="auto"`` a rank gets samples in proportion to its speed, measured in each epoch."""

from typing import Any

import lightning as L
from torch import Tensor

from samestep.callbacks.clock import ForwardTimer
from samestep.callbacks.notes import print_note
from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.data.loaders import order_of
from samestep.data.sampler import GlobalBatchSampler
from samestep.ranks import environment, process_group, virtual
from samestep.ranks.compat import callbacks_of
from samestep.run_spec import RunSpec

SIMILAR = 1.1  # ranks whose speeds differ by at most this factor keep their shares


def callback(spec: RunSpec) -> L.Callback | None:
    """``MeasuredShares``, if there are several ranks: rank zero says whether these are measured."""
    return MeasuredShares() if environment.world_size() > 1 else None


class MeasuredShares(L.Callback):
    """Times the forward passes of each epoch, after which the ranks agree on their shares."""

    def __init__(self) -> None:
        self._timer = ForwardTimer()
        self._batch = 0
        self._next: tuple[float, ...] = ()
        self._weighting: SliceWeighting

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find who knows the shares."""
        (self._weighting,) = callbacks_of(trainer, SliceWeighting)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when the forward pass begins."""
        self._batch = batch_idx
        if self._weighting.is_measured:
            self._timer.start(pl_module, batch_idx)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Count it."""
        if not self._timer.is_running:
            return
        order = order_of(trainer)
        if isinstance(order, GlobalBatchSampler):
            self._timer.stop(pl_module, order.lengths(self._batch)[virtual.current()])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Agree on the shares of the next epoch."""
        if not self._weighting.is_measured:
            return
        speeds = process_group.gather(self._timer.reset())
        shares = measured_shares(speeds, self._weighting.shares)
        if shares is None:
            return
        if virtual.layout().is_virtual:
            # What slices have counted in this epoch is read first.
            self._next = shares
        else:
            self._weighting.use_shares(trainer, shares)
        shown = ", ".join(f"{share:g}" for share in shares)
        epoch = trainer.current_epoch + 1
        print_note(trainer, f"Shares of the ranks: {shown} (measured in epoch {epoch})")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Deal the slices of virtual ranks, which changes no step."""
        shares, self._next = self._next, ()
        if shares:
            self._weighting.use_shares(trainer, shares)


def measured_shares(speeds: list[float], shares: tuple[float, ...]) -> tuple[float, ...] | None:
    """Shares in proportion to the speeds of the ranks; None if ``shares`` suit them already."""
    slowest = min(speeds)
    # An epoch of a few batches measures nothing.
    if slowest <= 0:
        return None
    shares = shares or (1.0,) * len(speeds)
    # In proportion to the time of a forward pass. Small differences are noise.
    times = [share / speed for share, speed in zip(shares, speeds, strict=True)]
    if max(times) <= SIMILAR * min(times):
        return None
    return tuple(round(speed / slowest, 2) for speed in speeds)
