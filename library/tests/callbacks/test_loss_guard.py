"""A run with a nan on one of two ranks: test_two_ranks.py."""

import copy
import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from samestep.callbacks.loss_guard import LossGuard, sum_on_cpu
from samestep.errors import RunError
from samestep.ranks import environment

pytestmark = pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*")


class Model(L.LightningModule):
    """Its loss is what the batch says; remembers its weights before each step."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: object) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.build = lambda: optimizer(self.parameters(), lr=0.1, **options)
        self.weights: list[torch.Tensor] = []
        self.moments: list[object] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.weights.append(self.layer.weight.detach().clone())
        self.moments.append(copy.deepcopy(self.optimizers().state_dict()["state"]))
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.build()


def fit(model: Model, guard: LossGuard, bad: dict[int, float], **options: object) -> None:
    batches = torch.ones(8, 2, 3)
    for number, value in bad.items():
        batches[number, 0, 0] = value
    L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[guard], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    ).fit(model, DataLoader(batches, batch_size=None))  # fmt: skip


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_fused_optimizer_reads_the_flag_that_is_set_on_a_gpu(
    optimizer: type[torch.optim.Optimizer],
):
    weight = nn.Parameter(torch.ones(3))
    fused = optimizer([weight], lr=0.1, fused=True)
    for flag, unchanged in [(1.0, True), (0.0, False)]:
        weight.grad = torch.ones(3)
        fused.grad_scale, fused.found_inf = None, torch.tensor(flag)
        fused.step()
        assert torch.equal(weight, torch.ones(3)) is unchanged


@pytest.mark.parametrize(
    ("value", "optimizer", "options"),
    [
        (torch.nan, torch.optim.AdamW, {"fused": True}),
        (torch.inf, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a_bad_step_changes_neither_weights_nor_moments(
    value: float, optimizer: type[torch.optim.Optimizer], options: dict[str, object], caplog
):
    model, guard = Model(optimizer, **options), LossGuard(max_skipped=2)
    fit(model, guard, {3: value})
    assert torch.equal(model.weights[4], model.weights[3])
    assert str(model.moments[4]) == str(model.moments[3])
    assert not torch.equal(model.weights[5], model.weights[4])
    assert guard.num_skipped == 1
    assert "step 4: the loss on rank 0 is infinite or nan; skipped, 1 of 2" in caplog.text


def test_one_bad_value_among_many_is_seen():
    gradients = [torch.ones(3), torch.full((1000,), 1e30)]
    assert math.isfinite(sum_on_cpu(gradients))
    for first, other in ((torch.nan, 0), (-torch.inf, 0), (torch.inf, -torch.inf)):
        bad = gradients[1].clone()
        bad[0], bad[999] = other, first
        assert not math.isfinite(sum_on_cpu([gradients[0], bad]))


def test_one_bad_batch_of_an_accumulated_step_leaves_it_out():
    model, guard = Model(torch.optim.SGD), LossGuard(max_skipped=1)
    fit(model, guard, {2: torch.nan}, accumulate_grad_batches=2)
    assert torch.equal(model.weights[4], model.weights[2])
    assert not torch.equal(model.weights[6], model.weights[4])


def test_one_step_too_many_ends_the_run_before_the_update():
    model, guard = Model(torch.optim.SGD), LossGuard(max_skipped=1)
    with pytest.raises(RunError, match=r"step 6: the loss on rank 0 .*Lower the learning rate"):
        fit(model, guard, {3: torch.nan, 5: torch.inf})
    assert torch.equal(model.layer.weight, model.weights[5])


@pytest.mark.parametrize(("guilty", "is_named"), [(["1"], True), (["0", "1"], False)])
def test_a_slice_without_a_target_has_a_remedy(monkeypatch, guilty: list[str], is_named: bool):
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    with pytest.raises(RunError, match="step 4: the loss on rank") as raised:
        LossGuard(0)._report_skipped(4, guilty, is_global_zero=True)
    assert ("samestep.mean" in str(raised.value)) == is_named
