"""Compares the weights of the ranks, so that no checkpoint holds those of one rank alone."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from samestep.callbacks.attributes import briefly
from samestep.errors import RunError
from samestep.ranks.process_group import gather
from samestep.ranks.sharded import ShardedStrategy

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UnequalWeightsError(RunError):
    """The ranks have trained different models."""

    is_final = True


class SameWeights(L.Callback):
    """Ends a run whose ranks have different weights, before they are saved.

    A checkpoint holds the weights of rank zero: the others would continue with weights that they
    have not trained, and nobody would know. Sharded weights are one for all ranks.
    """

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare one number for each parameter."""
        kinds = DDPStrategy | ShardedStrategy
        named = {n: p for n, p in pl_module.named_parameters() if not isinstance(p, DTensor)}
        if trainer.world_size == 1 or not isinstance(trainer.strategy, kinds) or not named:
            return
        sums = torch.stack([sum_of_bits(parameter) for parameter in named.values()])
        of_ranks = torch.tensor(gather(sums.tolist()))
        is_odd = (of_ranks != of_ranks[0]).any(0).tolist()
        odd = [name for name, differs in zip(named, is_odd, strict=True) if differs]
        if odd:
            raise UnequalWeightsError(
                f"the ranks have different weights before step {trainer.global_step} is saved: "
                f"{briefly(odd)}. The model changes them without DDP: by gradients "
                "of one rank (loss.backward() instead of self.manual_backward(loss), a parameter "
                "that is added while the run trains), by random numbers of one rank, or by a step "
                "that only some ranks take"
            )


def sum_of_bits(tensor: Tensor) -> Tensor:
    """A number that differs if the tensors of two ranks do, also where they are nan."""
    tensor = tensor.detach()
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.view(INTEGERS[values.element_size()]).sum(dtype=torch.int64)
