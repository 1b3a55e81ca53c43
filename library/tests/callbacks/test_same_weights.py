from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from samestep.callbacks import same_weights
from samestep.callbacks.same_weights import SameWeights, UnequalWeightsError, sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_sum_of_the_bits_differs_by_the_last_bit(dtype: torch.dtype):
    tensor = torch.ones(3, 2, dtype=dtype).t()
    other = tensor.clone()
    torch.view_as_real(other)[0, 0, 0].add_(1e-6) if dtype.is_complex else other[0, 0].add_(0.01)
    assert sum_of_bits(tensor) == sum_of_bits(tensor.clone()) != sum_of_bits(other)
    assert sum_of_bits(tensor * float("nan")) == sum_of_bits(tensor * float("nan"))


@pytest.mark.parametrize("step", [0, 1])
def test_different_weights_of_ranks_end_the_run(monkeypatch: pytest.MonkeyPatch, step: int):
    monkeypatch.setattr(same_weights, "gather", lambda own: [own, [own[0], own[1] + step]])
    trainer: Any = SimpleNamespace(world_size=2, strategy=DDPStrategy(), global_step=12)
    model: Any = torch.nn.Linear(2, 1)
    if step == 0:
        return SameWeights().on_save_checkpoint(trainer, model, {})
    with pytest.raises(UnequalWeightsError, match=r"different weights before step 12 .*: bias\."):
        SameWeights().on_save_checkpoint(trainer, model, {})
    return None
