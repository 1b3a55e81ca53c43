"""Values that a GPU computes: the process asks for them later, instead of waiting in each step.

Functions and not attributes of a tensor, so that a test without a GPU can go the way of one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.ranks import environment


def is_at_hand(tensor: Tensor) -> bool:
    """Whether its values can be read at once, because no device is still computing them."""
    return tensor.is_cpu


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether its values can be copied while this process goes on, which needs CUDA."""
    return tensor.is_cuda


def has_mps() -> bool:
    """Whether there is a GPU of Apple, which Lightning takes unless it is told otherwise."""
    return torch.backends.mps.is_available() and environment.variable("DISABLE_MPS") != "1"


def module_of_gpu() -> Any:
    """The module of torch that has the random numbers of the GPU here; None if none is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda
    return torch.mps if has_mps() else None


def with_64_bits(tensor: Tensor) -> Tensor:
    """A tensor where its values can be added in 64 bits, which Apple's GPUs cannot do."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


# Integers of the same size as a float, to compare its bits.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """A number that differs if the tensors of two ranks do, also where they are nan."""
    tensor = with_64_bits(tensor.detach())
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Integers, because nan differs from itself, and a sum of floats would round differences away.
    return values.view(INTEGERS[values.element_size()]).sum(dtype=torch.int64)


class Copy(NamedTuple):
    """Numbers on their way from a GPU."""

    values: Tensor
    """In memory of the process; valid when the event is reached."""
    event: Any


def start_copy(values: Sequence[Tensor]) -> Copy:
    """Copy numbers of 64 bits from a GPU, all at once: each copy takes as long as a kernel."""
    stacked = torch.stack([*values])
    # Only to pinned memory a copy runs beside the process.
    copied = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
    copied.copy_(stacked, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(stacked.device))
    return Copy(copied, event)
