"""The gradient of a step is the mean over its samples, however they are shared out."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from samestep.callbacks import clock, slice_weighting
from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.data.loader import BatchLoader
from samestep.data.loaders import find_batch_loaders
from samestep.errors import ConfigError
from samestep.plugins import preflight
from samestep.plugins.measured_shares import MeasuredShares
from samestep.ranks import environment, process_group
from samestep.run_spec import RunSpec

DATA = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "barebones": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Model(L.LightningModule):
    """Learns from mean losses; one of its parameters gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.unused = nn.Linear(3, 1), nn.Linear(1, 1)
        self.seen: list[Tensor] = []  # samples of each batch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0])
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gradients(L.Callback):
    """Keeps the gradient of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        assert pl_module.unused.weight.grad is None
        self.steps.append(pl_module.layer.weight.grad.clone())


class KeepWeights(L.Callback):
    """Takes no step, so that each rank, which is trained alone here, has the same weights."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0


def gradients(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, parts: int, shares=None, **options
) -> tuple[list[Tensor], list[Tensor]]:
    """What one of several ranks would give to DDP's mean in each step, and the samples it saw."""
    monkeypatch.setattr(environment, "rank", lambda: rank)
    monkeypatch.setattr(environment, "world_size", lambda: world_size)
    loader = BatchLoader(DATA, seed=3, shuffle=True, accumulate_grad_batches=parts, **options)
    model, kept, slices = Model(), Gradients(), SliceWeighting(shares or "equal")
    trainer = L.Trainer(
        max_epochs=1, accumulate_grad_batches=parts, callbacks=[slices, kept, KeepWeights()],
        **QUIET,
    )  # fmt: skip
    trainer.fit(model, loader)
    return kept.steps, model.seen


@pytest.mark.parametrize(
    ("world_size", "parts", "shares", "options"),
    [
        (2, 1, None, {"batch_size": 8, "drop_last": True}),
        (3, 1, None, {"batch_size": 8, "drop_last": True}),
        (1, 3, None, {"batch_size": 8, "drop_last": True}),
        (3, 2, None, {"batch_size": 9, "drop_last": True}),
        (2, 2, (1.0, 2.5), {"batch_size": 9, "drop_last": True}),
        (3, 1, None, {"batch_size": 18}),  # the last step has 4 samples
    ],
)
def test_the_mean_over_the_ranks_is_the_mean_over_the_samples(
    monkeypatch: pytest.MonkeyPatch, world_size: int, parts: int, shares, options
):
    (*expected,), (*steps,) = gradients(monkeypatch, 0, 1, 1, **options)
    ranks = [
        gradients(monkeypatch, rank, world_size, parts, shares, **options)
        for rank in range(world_size)
    ]
    assert sorted(torch.cat([x for _, seen in ranks for x in seen]).tolist()) == sorted(
        torch.cat(steps).tolist()
    )
    for number, gradient in enumerate(expected):
        mean = torch.stack([own[number] for own, _ in ranks]).mean(0)
        torch.testing.assert_close(mean, gradient, rtol=1e-5, atol=1e-7)


def test_equal_slices_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    def reject(*args: object) -> None:
        raise AssertionError("a hook was registered")

    monkeypatch.setattr(Tensor, "register_hook", reject)
    gradients(monkeypatch, 1, 2, 2, batch_size=8, drop_last=True)
    with pytest.raises(AssertionError, match="a hook was registered"):
        gradients(monkeypatch, 1, 2, 2, batch_size=9, drop_last=True)


def test_a_short_last_batch_that_leaves_a_rank_without_a_sample_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(ConfigError, match=r"a batch has fewer samples than .*drop_last=True"):
        gradients(monkeypatch, 0, 3, 1, batch_size=19)  # 2 samples are left
    assert len(gradients(monkeypatch, 0, 3, 1, batch_size=19, drop_last=True)[0]) == 2


@pytest.mark.parametrize(
    ("shares", "is_rejected"),
    [([1.0, 2.0], True), ("auto", True), ([1.0, 1.0], False), ("equal", False)],
)
def test_ordinary_loaders_have_equal_shares(monkeypatch, shares, is_rejected: bool):
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    trainer = L.Trainer(max_epochs=1, callbacks=[SliceWeighting(shares)], **QUIET)
    with (
        pytest.raises(ConfigError, match="an ordinary DataLoader") if is_rejected else nullcontext()
    ):
        trainer.fit(Model(), DataLoader(DATA, batch_size=8))


@pytest.mark.parametrize("shares", [[1.0, 2.0], "auto"])
def test_several_loaders_have_equal_shares(monkeypatch, shares):
    """Found when training begins, and not when the ranks have measured their speeds."""
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    callback = SliceWeighting(shares, split_batches=True)
    trainer = L.Trainer(max_epochs=1, callbacks=[callback], **QUIET)
    with pytest.raises(ConfigError, match="or several loaders, give every rank the same share"):
        trainer.fit(Model(), [BatchLoader(DATA, 8), DataLoader(DATA, batch_size=8)])


@pytest.fixture
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """One rank on the first node, two on the second; what the ranks gather can be set."""
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    monkeypatch.setattr(environment, "num_nodes", lambda: 2)
    monkeypatch.setattr(environment, "node_rank", lambda: "this node")
    gathered: dict[str, list[Any]] = {"this node": [0, 1, 1]}
    gather = lambda value: gathered.get(value, gathered.get("speeds", []))  # noqa: E731
    monkeypatch.setattr(process_group, "gather", gather)
    return gathered


def test_numbers_are_of_nodes_or_of_ranks(three_ranks):
    assert slice_weighting.shares_of_ranks([1, 2.5]) == [1, 2.5, 2.5]
    assert slice_weighting.shares_of_ranks([1, 2, 3]) == [1, 2, 3]
    rejected = preflight.failure(findings_on([1, 2, 3, 4]))
    assert isinstance(rejected, ConfigError)
    assert "3 ranks on 2 nodes; give one number for each rank" in str(rejected)
    (finding,) = findings_on([1, 2.5])
    assert finding.result == "ok"
    assert findings_on("auto") == []


def findings_on(shares: Any) -> list[preflight.Finding]:
    """What the preflight says about them."""
    spec = RunSpec("test", Path(), 0, shares=shares)
    findings = preflight.check_this_rank(spec, L.LightningModule())
    return [finding for finding in findings if finding.check == "shares"]


def fit_measured(
    three_ranks, *speeds: float, saved: dict[str, Any] | None = None
) -> SliceWeighting:
    """Train an epoch after which the ranks turn out to be as fast as this."""
    three_ranks["speeds"] = list(speeds)
    callback = SliceWeighting("auto")
    callback.load_state_dict(saved or {})
    trainer = L.Trainer(max_epochs=1, callbacks=[callback, MeasuredShares()], **QUIET)
    trainer.fit(Model(), BatchLoader(DATA, 8))
    return callback


def test_measured_shares_are_in_proportion_to_the_speeds(three_ranks, capsys):
    callback = fit_measured(three_ranks, 200, 100, 333)
    assert callback.shares == (2, 1, 3.33)
    assert "Shares of the ranks: 2, 1, 3.33 (measured in epoch 1)" in capsys.readouterr().out
    assert fit_measured(three_ranks, 100, 105, 109).shares == (), "they are alike"
    assert fit_measured(three_ranks, 0, 100, 100).shares == (), "an epoch of a few batches"


def test_measured_shares_are_kept_for_as_many_ranks(three_ranks):
    saved = fit_measured(three_ranks, 200, 100, 333).state_dict()
    again = fit_measured(three_ranks, 201, 99, 333, saved=saved)
    assert again.shares == (2, 1, 3.33), "these speeds ask for no others"
    saved = {"shares": [2, 1]}
    assert fit_measured(three_ranks, 100, 100, 100, saved=saved).shares == ()


def test_each_rank_measures_its_own_speed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "world_size", lambda: 2)
    seen: list[Any] = []
    monkeypatch.setattr(process_group, "gather", lambda value: seen.append(value) or [value, value])
    seconds = iter(range(1000))  # each forward pass of 4 samples takes one second
    monkeypatch.setattr(clock, "synchronized_time", lambda pl_module: float(next(seconds)))
    callbacks = [SliceWeighting("auto"), MeasuredShares()]
    L.Trainer(max_epochs=1, callbacks=callbacks, **QUIET).fit(Model(), BatchLoader(DATA, 8))
    assert seen[-1] == 4.0


def test_several_loaders_must_have_equal_slices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    one, other = (BatchLoader(DATA, size, drop_last=True) for size in (9, 8))
    assert list(find_batch_loaders({"a": [one, DataLoader(DATA)], "b": other})) == [one, other]
    trainer = L.Trainer(max_epochs=1, callbacks=[SliceWeighting()], **QUIET)
    with pytest.raises(ConfigError, match="several BatchLoaders need slices of equal length"):
        trainer.fit(Model(), {"a": one, "b": other})
