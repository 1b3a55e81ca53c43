"""The gradients of a step, and their norm: computed once for all that need it.

On a GPU the guard needs the norms of all parameters in each step, clipping and ``RunStats`` the
norm of all gradients. Each kernel costs this process as much time as a small step has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from samestep.ranks import compat
from samestep.ranks.sharded import parameters_of


@dataclass
class Norms:
    """What is known of the norms of some gradients."""

    gradients: list[Tensor]
    versions: list[int] = field(default_factory=list)
    of_each: list[Tensor] = field(default_factory=list)
    """The norm of each gradient; empty if they must be computed together."""
    total: Tensor | None = None

    def are_of(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the same gradients, and nothing has changed them since."""
        if len(gradients) != len(self.gradients):
            return False
        for ours, theirs in zip(self.gradients, gradients, strict=True):
            if ours is not theirs:
                return False
        return compat.versions_of(gradients) == self.versions


_norms = Norms([])


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters, where they have one."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]


def forget_norms() -> None:
    """Let the memory of the gradients go, before those of the next step need it."""
    global _norms
    _norms = Norms([])


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all gradients; every rank must call this if they are sharded."""
    norms = _find_norms(gradients)
    if norms.total is None and norms.of_each:
        # As torch does it, so that it makes no difference who has computed the norm.
        norms.total = torch.linalg.vector_norm(torch.stack(norms.of_each))
    elif norms.total is None:
        total = get_total_norm([values_of(gradient) for gradient in gradients])
        norms.total = total.full_tensor() if isinstance(total, DTensor) else total
    return norms.total


def known_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """Their norm, if all or most of it is known, and it is one of this rank alone."""
    if not _norms.are_of(gradients) or any(map(is_sharded, gradients)):
        return None
    return norm_of(gradients)


def mark_if_not_finite(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Set a flag, a 0 on the device of the gradients, to 1 if one of them is infinite or nan."""
    norms = _find_norms(gradients)
    found = norms.of_each or [norm_of(gradients)]
    if found[0].dtype is torch.bfloat16:
        # The kernel on GPUs does not have this type.
        found = [norm_of(gradients).float()]
    compat.mark_if_not_finite(found, flag)


def _find_norms(gradients: Sequence[Tensor]) -> Norms:
    """What is known of these gradients, from now on."""
    global _norms
    if not _norms.are_of(gradients):
        _norms = Norms([*gradients], compat.versions_of(gradients))
        if are_alike(gradients):
            _norms.of_each = compat.norms_of_each(gradients)
    return _norms


def are_alike(gradients: Sequence[Tensor]) -> bool:
    """Whether one operation takes them all: dense, of one type, and on one CPU or GPU."""
    if not gradients:
        return False
    first = gradients[0]
    if first.device.type not in ("cpu", "cuda"):
        return False
    for gradient in gradients:
        is_dense = gradient.layout is torch.strided and not is_sharded(gradient)
        if not is_dense or gradient.dtype is not first.dtype or gradient.device != first.device:
            return False
    return True


def is_sharded(gradient: Tensor) -> bool:
    """Whether other ranks have parts of it."""
    return isinstance(gradient, DTensor)


def values_of(gradient: Tensor) -> Tensor:
    """The values that are not 0, of a sparse gradient; torch has no norm of several of these."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient
