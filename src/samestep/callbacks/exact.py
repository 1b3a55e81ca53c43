"""Exact resume for any LightningModule: random numbers, order of the data, buffers, sums.

Each callback keeps one thing the same on any number of ranks, before and after an interruption.
They are part of every run; the user's module has nothing to remember.
"""

import logging
import math
import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

from samestep.callbacks.share_out import find_batch_loaders, find_loaders, weights_of_ranks
from samestep.callbacks.sums import Sums
from samestep.data.loader import BatchLoader
from samestep.data.sampler import mix_seed

log = logging.getLogger(__name__)

NOTE = (
    "Note: the training data come from an ordinary DataLoader. If an epoch is interrupted, the "
    "rest of it sees other samples than it would have seen, and several ranks repeat samples to "
    "make their shares equal. BatchLoader is exact:"
)
NOTE_ON_STREAMS = (
    "Note: the training data come from an ordinary DataLoader of unknown length. If an epoch is "
    "interrupted, it begins again with the first samples, and takes more steps. Each of several "
    "ranks sees all samples, unless your data set shares them out. BatchLoader is exact:"
)


class SeedSteps(L.Callback):
    """Makes the random numbers of a training step a pure function of seed, epoch, batch and rank.

    Dropout then draws the same numbers in a run that was interrupted, and so does a step that asks
    NumPy or Python's ``random``, as many recipes of mixup do.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed this step."""
        seed = mix_seed(self.seed, trainer.current_epoch, batch_idx, trainer.global_rank)
        # torch.manual_seed would also queue a call, with a stack trace, for GPUs not in use.
        torch.default_generator.manual_seed(seed)
        seed_others(seed)
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(seed)


class ResumeOrder(L.Callback):
    """Lets the training data go on where the run was interrupted.

    A ``BatchLoader`` goes on with the batch after the last step. An ordinary DataLoader cannot
    begin within an epoch; its user is told so once. The order that it draws for an epoch is a pure
    function of the seed and the epoch, because the random numbers are seeded before it draws.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.batch = 0  # batches of this epoch that were trained on
        self._is_first_epoch = True  # of this process

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Seed the order of the first epoch: Lightning makes its iterator before it starts."""
        seed_all(mix_seed(self.seed, self.epoch))
        self._is_first_epoch = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Place the data; an interrupted epoch has no ``on_train_epoch_start``."""
        self.epoch = trainer.current_epoch
        self._place(trainer)
        loaders = find_loaders(trainer.train_dataloader)
        if trainer.is_global_zero and not all(isinstance(each, BatchLoader) for each in loaders):
            is_endless = trainer.num_training_batches == math.inf
            print(f"{NOTE_ON_STREAMS if is_endless else NOTE} docs/contract.md", flush=True)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Place the data at the start of a new epoch, and seed its order."""
        self._place(trainer)
        if not self._is_first_epoch:
            seed_all(mix_seed(self.seed, self.epoch))
        self._is_first_epoch = False

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch."""
        self.batch = batch_idx + 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count anew."""
        self.epoch, self.batch = trainer.current_epoch + 1, 0
        self._is_first_epoch = False

    def state_dict(self) -> dict[str, int]:
        """How far the epoch has come."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]

    def _place(self, trainer: L.Trainer) -> None:
        for loader in find_batch_loaders(trainer.train_dataloader):
            # The shorter one of two loaders begins again within an epoch.
            is_over = self.batch > len(loader) > 0
            loader.start_at(self.epoch, self.batch % len(loader) if is_over else self.batch)


class AverageBuffers(L.Callback):
    """Gives every rank the mean of the buffers, such as batch norm's running statistics.

    Each rank keeps statistics of its own samples while it trains. They are averaged before each
    validation and at the end of each epoch, so that every rank, and the checkpoint, hold the same
    model. A rank with a larger share of the samples counts more. A checkpoint within an epoch keeps
    the buffers of each rank.
    """

    def __init__(self) -> None:
        # Of each rank, from a checkpoint: the buffers, and what they count for.
        self._saved: list[list[Tensor]] = []
        self._saved_weights: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put back this rank's buffers, or the mean if the number of ranks has changed."""
        saved, self._saved = self._saved, []
        if not saved:
            return
        buffers = float_buffers(pl_module)
        if len(saved) == trainer.world_size:
            own = saved[trainer.global_rank]
        else:
            weighted = [
                [weight * buffer for buffer in of_rank]
                for weight, of_rank in zip(self._saved_weights, saved, strict=True)
            ]
            own = [torch.stack(parts).mean(0) for parts in zip(*weighted, strict=True)]
        for buffer, value in zip(buffers, own, strict=True):
            buffer.copy_(value)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate the same model on every rank."""
        self._average(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the same model on every rank."""
        self._average(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the buffers of each rank."""
        if trainer.world_size == 1:
            return
        ranks = [gather(buffer).cpu() for buffer in float_buffers(pl_module)]
        if ranks:
            checkpoint["buffers_of_ranks"] = [list(own) for own in zip(*ranks, strict=True)]
            checkpoint["weights_of_ranks"] = weights_of_ranks(trainer)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember them until training starts: the strategy still moves the model until then."""
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get("buffers_of_ranks", [])
            self._saved_weights = checkpoint.get("weights_of_ranks", [])

    def _average(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size > 1:
            weight = weights_of_ranks(trainer)[trainer.global_rank]
            for buffer in float_buffers(pl_module):
                buffer.copy_(trainer.strategy.reduce(weight * buffer, reduce_op="mean"))


class KeepSums(L.Callback):
    """Saves the ``Sums`` of an unfinished epoch with a checkpoint, those of each rank."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the sums of all ranks, ``[ranks, sums]`` for each module of the class ``Sums``."""
        checkpoint["sums"] = {
            name: gather(sums.state()).cpu() for name, sums in sums_of(pl_module).items()
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give each rank its own sums, or rank zero all of them if the number has changed."""
        if trainer.state.fn != "fit":
            return
        saved: dict[str, Tensor] = checkpoint.get("sums", {})
        for name, sums in sums_of(pl_module).items():
            if name not in saved:
                continue
            ranks = saved[name]
            if len(ranks) == trainer.world_size:
                sums.load_state(ranks[trainer.global_rank])
            elif trainer.global_rank == 0:
                sums.load_state(ranks.sum(0))


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python's ``random``."""
    torch.manual_seed(seed)
    seed_others(seed)


def seed_others(seed: int) -> None:
    """Seed NumPy and Python's ``random``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def sums_of(module: nn.Module) -> dict[str, Sums]:
    """Every ``Sums`` within a module, by its name there."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Sums)}


def float_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers of a module that have a mean: no counters, nothing that is empty."""
    return [b for b in module.buffers() if b.is_floating_point() and b.numel()]


def gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, ``[ranks, ...]``; every rank must call this."""
    if not dist.is_initialized():
        return tensor[None]
    ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tensor.contiguous())
    return torch.stack(ranks)
