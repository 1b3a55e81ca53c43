"""Learning rates over a run."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, *, total_steps: int, warmup: float) -> LambdaLR:
    """Rise in a straight line to the optimizer's learning rate, then fall to 0 along a cosine.

    Args:
        optimizer: its ``lr`` is the peak.
        total_steps: optimizer steps of the whole run.
        warmup: share of ``total_steps`` spent rising, 0 to 1.

    Raises:
        ValueError: if ``warmup`` is no such share.

    Source:
        Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983; warm-up: Goyal et al.,
        https://arxiv.org/abs/1706.02677.
    """
    if not 0 <= warmup <= 1:
        raise ValueError(f"warmup={warmup}: must be a share from 0.0 to 1.0")
    warmup_steps = math.ceil(warmup * total_steps)

    def share_of_lr(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return LambdaLR(optimizer, share_of_lr)
