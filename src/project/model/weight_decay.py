"""Which parameters decay."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Groups = list[dict[str, Any]]


def make_optimizer(factory: Callable[[Groups], Optimizer], groups: Groups) -> Optimizer:
    """The optimizer that ``factory`` builds, with weight decay on matrices and kernels only.

    Norms and biases of each parameter group become a group of their own, without weight decay.
    """
    optimizer = factory(groups)
    # Without weight decay nothing is split: each group costs kernels of its own.
    if not optimizer.defaults.get("weight_decay"):
        return optimizer
    split = []
    for group in groups:
        matrices = [p for p in group["params"] if p.ndim > 1]
        vectors = [p for p in group["params"] if p.ndim <= 1]
        split.append(group | {"params": matrices})
        split.append(group | {"params": vectors, "weight_decay": 0.0})
    return factory(split)
