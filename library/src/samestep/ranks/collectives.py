"""The operations of all ranks together: each goes to a backend that accepts its tensors.

``process_group.init`` makes groups with gloo for the CPU and NCCL for GPUs. Others do not:
Lightning makes the group of ``strategy="ddp"`` in one process with NCCL alone, as does a script
that calls ``init_process_group("nccl")``. NCCL rejects tensors on the CPU, where all decisions of a
run are. These tensors use a second group of the same ranks then, with gloo.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

Group = dist.ProcessGroup

_made: tuple[Any, Any] = lambda: None, None  # the group that exists, as a weak reference, and ours


def num_ranks() -> int:
    """The number of ranks that exchange anything; 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def cpu_group() -> Group | None:
    """The group for tensors on the CPU; None is the one that exists, as in ``torch.distributed``.

    Every rank must call this at the same point: the first call may make the group.
    """
    global _made
    # Such as "cpu:gloo,cuda:nccl".
    if "cpu:" in dist.get_backend_config():
        return None
    known, group = _made
    world: Any = dist.group.WORLD
    # A script may destroy its group and make another one, which needs a group beside it too.
    if known() is not world:
        group = dist.new_group(backend="gloo")
        _made = weakref.ref(world), group
    return cast(Group, group)


def group_of(tensor: Tensor) -> Group | None:
    """The group for this tensor: that of the CPU, or the one that exists."""
    return cpu_group() if tensor.is_cpu else None


def all_reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Replace the values of a tensor by those over all ranks, and return it."""
    # Not only to spare a call: a group of one rank needs no backend for it.
    if num_ranks() > 1:
        dist.all_reduce(tensor, operation, group=group_of(tensor))
    return tensor


def all_gather(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, by rank; all must have the same shape."""
    if num_ranks() == 1:
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(num_ranks())]
    dist.all_gather(gathered, tensor, group=group_of(tensor))
    return gathered


def averages_on_cpu() -> bool:
    """Whether gloo averages gradients over parts, as FSDP asks it to; all ranks must call this.

    That of torch 2.8 adds them up instead, without a word. That of torch 2.6 raises.
    """
    mean, ones = torch.zeros(1), torch.ones(num_ranks())
    try:
        dist.reduce_scatter_tensor(mean, ones, dist.ReduceOp.AVG, group=cpu_group())
    except (RuntimeError, ValueError):
        return False
    return mean.item() == 1


def broadcast(tensor: Tensor) -> None:
    """Replace the values of a tensor by those of rank zero."""
    dist.broadcast(tensor, src=0, group=group_of(tensor))


def send(tensor: Tensor, target: int) -> None:
    """Send a tensor to one other rank, which must call ``receive``."""
    dist.send(tensor, target, group=group_of(tensor))


def receive(tensor: Tensor, source: int) -> None:
    """Fill a tensor with the one that a rank sends."""
    dist.recv(tensor, source, group=group_of(tensor))
