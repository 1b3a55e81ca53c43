"""The gradients of a step, and their norm: computed once for all that need it.

On a GPU the guard needs the norms of all parameters in each step, clipping and ``RunStats`` the
norm of all gradients. Each kernel costs this process as much time as a small step has.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

KERNELS = ("cpu", "cuda")
"""The kinds of devices for which every version of torch has one operation for all gradients."""


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
        # By their ids: tensors are compared value by value. Those that are known here are kept, so
        # that no other tensor can have got the id of one.
        has_same = [*map(id, gradients)] == [*map(id, self.gradients)]
        # A hook of the user may have changed them after the guard has seen them.
        return has_same and versions_of(gradients) == self.versions


_norms = Norms([])


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of an optimizer, in the order in which its state counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """The gradients of an optimizer's parameters, where they have one."""
    found = []
    for parameter in parameters_of(optimizer):
        # Such as one that is frozen.
        if parameter.grad is not None:
            found.append(parameter.grad)
    return found


def forget_norms() -> None:
    """Let the memory of the gradients go, before those of the next step need it."""
    global _norms
    _norms = Norms([])


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all gradients; every rank must call this if they are sharded."""
    norms = _find_norms(gradients)
    if norms.total is None:
        norms.total = _compute_total(norms)
    return norms.total


def _compute_total(norms: Norms) -> Tensor:
    """The norm of all gradients from those of each, if there are any."""
    total: Tensor
    if norms.of_each:
        # As torch does it, so that it makes no difference who has computed the norm.
        total = torch.linalg.vector_norm(torch.stack(norms.of_each))
    else:
        total = get_total_norm([values_of(gradient) for gradient in norms.gradients])
    if isinstance(total, DTensor):
        # Each rank has the norm of its parts only.
        total = total.full_tensor()
    return total


def known_norm(gradients: Sequence[Tensor]) -> Tensor | None:
    """Their norm, if all or most of it is known, and it is one of this rank alone."""
    # torch clips sharded gradients by a norm that is one too.
    if any(map(is_sharded, gradients)) or not _norms.are_of(gradients):
        return None
    return norm_of(gradients)


def mark_if_not_finite(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Set a flag, a 0 on the device of the gradients, to 1 if one of them is infinite or nan."""
    if flag.device.type not in KERNELS:
        flag.copy_(norm_of(gradients).isfinite().logical_not())
        return
    norms = _find_norms(gradients)
    found = norms.of_each or [norm_of(gradients)]
    if found[0].dtype is torch.bfloat16:
        # The kernel on GPUs does not have this type.
        found = [norm_of(gradients).float()]
    mark_norms(found, flag)


def _find_norms(gradients: Sequence[Tensor]) -> Norms:
    """What is known of these gradients, from now on."""
    global _norms
    if not _norms.are_of(gradients):
        _norms = Norms([*gradients], versions_of(gradients))
        if are_alike(gradients):
            _norms.of_each = norms_of_each(gradients)
    return _norms


def are_alike(gradients: Sequence[Tensor]) -> bool:
    """Whether one operation takes them all: dense, of one type, and on one CPU or GPU."""
    if not gradients:
        return False
    kinds = {(each.layout, each.dtype, each.device) for each in gradients}
    if len(kinds) > 1 or any(map(is_sharded, gradients)):
        return False
    layout, _, device = kinds.pop()
    # torch itself goes another way on other devices.
    return layout is torch.strided and device.type in KERNELS


def is_sharded(gradient: Tensor) -> bool:
    """Whether other ranks have parts of it."""
    return isinstance(gradient, DTensor)


def values_of(gradient: Tensor) -> Tensor:
    """The values that are not 0, of a sparse gradient; torch has no norm of several of these."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def clip_by_known_norm(trainer: L.Trainer) -> None:
    """Let Lightning 2.6 clip gradients by the norm that the guard has computed, to the same bits.

    A plugin that clips in its own way is left alone.
    """
    plugin: Any = trainer.precision_plugin
    if type(plugin).clip_grad_by_norm is not Precision.clip_grad_by_norm:
        return

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = [*plugin.main_params(optimizer)]
        norm = known_norm([p.grad for p in parameters if p.grad is not None])
        if norm is None:
            clip_grad_norm_(parameters, clip_val)
        else:
            clip_grads_with_norm_(parameters, clip_val, norm)

    plugin.clip_grad_by_norm = clip


def skip_fused_step(optimizer: Optimizer, skip: Tensor) -> None:
    """Let a fused optimizer of torch 2.15 skip its next step if ``skip``, a float32, is 1.

    torch's GradScaler sets these attributes. Nothing else tells a fused optimizer to skip a step
    without the process having to wait for the device.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]


def norms_of_each(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norms of gradients of one type on one device, by one operation.

    torch 2.15 computes the norm of all of them from these; its public function returns that alone.
    """
    with torch.no_grad():
        return [*torch._foreach_norm([*gradients], 2)]


def mark_norms(norms: Sequence[Tensor], flag: Tensor) -> None:
    """Set ``flag``, a float32 of 0, to 1 if one of the norms is infinite or nan.

    torch's GradScaler finds them so. It is one operation, and public ones would be five. It also
    multiplies by a scale, which is 1.
    """
    torch._amp_foreach_non_finite_check_and_unscale_([*norms], flag, one_on(flag.device))


@cache
def one_on(device: Any) -> Tensor:
    """The number 1 on a device."""
    return torch.ones((), device=device)


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """How often each tensor was changed in place, which autograd of torch 2.15 counts."""
    return [tensor._version for tensor in tensors]
