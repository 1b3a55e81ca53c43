"""Canaries: tests that fail once a library no longer needs, or no longer has, what we patch."""

import inspect
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import lightning.fabric
import lightning.pytorch.trainer.trainer
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop
from lightning.pytorch.loops.optimization.automatic import Closure, _AutomaticOptimization
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
    _LoggerConnector,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _ResultCollection,
    _ResultMetric,
)
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader, data
from lightning.pytorch.utilities.combined_loader import _Sequential
from lightning.pytorch.utilities.data import _dataloader_init_kwargs_resolve_sampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, Metric

from library.tests.canaries import Sources, check_sources
from library.tests.kit import Net, batches, fit, flat, on_ranks
from library.tests.programs import run_code
from samestep.callbacks import data_resume
from samestep.callbacks.loss_guard import LossGuard
from samestep.ranks import collectives, compat, epoch_logs, process_group

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*")


CANARIES: dict[str, Sources] = {
    "talks to other ranks in its handler": [
        (_SignalConnector._sigterm_notifier_fn, ["broadcast"]),
        (lightning.pytorch.trainer.trainer, ["_signal_connector.register_signal_handlers"]),
    ],
    # Where ``reduce_logs_over_ranks`` reduces: before anybody reads the values.
    "ends an epoch in this order": [
        (_FitLoop.on_advance_end, [
            "epoch_end_reached()", "monitoring_callbacks=False", "_call_lightning_module",
            "monitoring_callbacks=True", ".on_epoch_end()",
        ]),
        (_EvaluationLoop._store_dataloader_outputs, [
            "epoch_end_reached()", "update_eval_epoch_metrics()",
        ]),
        (_EvaluationLoop._on_evaluation_epoch_end, [
            "_call_lightning_module_hook(trainer, hook_name)", "on_epoch_end()",
        ]),
    ],
    "takes a computed value as it is": [
        (_ResultCollection._get_cache, ["if result_metric._computed is None:"]),
        (_ResultCollection._get_cache, ["It is recommended to use"]),
    ],
    # As ``resume_logs`` expects it.
    "compares how a metric is logged, and resets it in the first batch of an epoch": [
        (_ResultCollection.log, ["if key not in self:", "elif meta != self[key].meta:"]),
        (_LoggerConnector.should_reset_tensors, ["self._first_loop_iter in (None, True)"]),
        (_LoggerConnector.on_batch_start, ["is True:", "self._first_loop_iter = False"]),
    ],
    "sums the gradients that were needed when it was made (DDP)": [
        (DistributedDataParallel._build_params_for_reducer, ["if param.requires_grad"]),
    ],
    "takes a step by one closure, reads an item for a batch, and adds up states (virtual ranks)": [
        (_AutomaticOptimization._make_closure, ["zero_grad_fn=zero_grad_fn)"]),
        (Closure.__call__, ["self._result = self.closure("]),
        (_Sequential.__next__, ["next(self.iterators[0])"]),
        (Metric._sync_dist, ["setattr(self, attr, reduced)"]),
    ],
    "keeps its Trainer (Tuner)": [(Tuner.__init__, ["self._trainer = trainer"])],
    "replaces batch samplers": [
        (_DataConnector._prepare_dataloader, [
            "return _update_dataloader(dataloader, sampler, mode=mode)",
        ]),
        (_dataloader_init_kwargs_resolve_sampler, [
            'return {"sampler": sampler, "shuffle": False, "batch_sampler": None}',
        ]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", CANARIES)
def test_canary_lightning_still(what: str):
    check_sources(CANARIES[what])


def test_names_that_are_used_still_exist():
    assert "requires_grad" not in inspect.getsource(DistributedDataParallel._pre_forward)
    assert callable(DistributedDataParallel._remove_autograd_hooks)
    assert callable(DistributedDataParallel._check_reducer_finalized)
    assert CombinedLoader([], "max_size_cycle")._mode == "max_size_cycle"
    told = []
    sampler = SimpleNamespace(set_epoch=told.append)
    data_resume.set_epoch(SimpleNamespace(sampler=sampler, batch_sampler=None), 3)
    assert told == [3]


def test_values_of_all_ranks_become_one(monkeypatch: pytest.MonkeyPatch):
    """The means by their samples; a value that a rank lacks is that of the others."""
    epoch_logs.install()
    nan = float("nan")
    own = [("mean", 1.0, 1), ("max", 1.0, 1), ("empty", 1.0, 0), ("last", 1.0, 9)]
    others = [("mean", 3.0, 3), ("max", nan, 1), ("empty", 1.0, 0), ("last", 3.0, 1)]
    logs: list[Any] = []
    for values in ([*others, ("other", 2.0, 2)], own):
        trainer = tiny_trainer(devices=1)
        loop = trainer.fit_loop.epoch_loop
        for name, value, size in values:
            options: dict[str, Any] = {"reduce_fx": "max" if name == "max" else "mean"}
            if name in ("last", "other"):
                options |= {"on_step": True, "on_epoch": name == "other"}
            loop._results.log("f", name, torch.tensor(value), batch_size=size, **options)
        logs.append(epoch_logs.collect_logs(trainer))
    loop._results.log("f", "synced", torch.tensor(1.0), sync_dist=True)
    monkeypatch.setattr(process_group, "gather", lambda own: [own, [logs[0]]])
    monkeypatch.setattr(collectives, "num_ranks", lambda: 2)
    monkeypatch.setattr(L.Trainer, "_results", loop._results)
    monkeypatch.setattr(L.Trainer, "lightning_module", Net())
    trainer._logger_connector.epoch_end_reached()
    figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
    expected = {"mean": 2.5, "max": nan, "empty": nan, "last": 2, "synced": 1}
    assert figures == pytest.approx(expected | {"other": 2, "other_epoch": 2}, nan_ok=True)


def test_canary_torchmetrics_still_loses_the_number_of_updates():
    metric, other = MeanSquaredError(), MeanSquaredError()
    metric.persistent(True)
    metric(torch.ones(2), torch.zeros(2))
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    assert (metric.update_count, other.update_count) == (1, 0)


def test_metrics_of_two_ranks_continue_in_one():
    states = []
    whole = MeanSquaredError()
    for value in (1.0, 3.0):
        metric = MeanSquaredError()
        for each in (metric, whole):
            each.update(torch.full((2,), value), torch.zeros(2))
        states.append(epoch_logs.metric_state(metric))
    merged = MeanSquaredError()
    epoch_logs.resume_metric(merged, states)
    assert (merged.update_count, merged.compute()) == (2, whole.compute())


def test_logs_of_two_ranks_continue_in_one_whose_program_logs_in_another_way():
    of_ranks = []
    for value in (1.0, 3.0):
        trainer = tiny_trainer(devices=1)
        for name in ("mean", "sum", "min", "max"):
            trainer.fit_loop.epoch_loop._results.log(
                "f", name, torch.tensor(value), reduce_fx=name, sync_dist=True, batch_size=2
            )
        of_ranks.append(epoch_logs.collect_logs(trainer))
    trainer = tiny_trainer(devices=1)
    epoch_logs.resume_logs(trainer, Net(), of_ranks)
    results = trainer.fit_loop.epoch_loop._results
    results.log("f", "mean", torch.tensor(8.0), prog_bar=True, batch_size=2)
    figures = {name: value.item() for name, value in results.metrics(False)["callback"].items()}
    assert figures == {"mean": 4, "sum": 4, "min": 1, "max": 3}
    # As in a run that was not interrupted, each metric has one way from here on.
    with pytest.raises(MisconfigurationException, match="twice"):
        results.log("f", "mean", torch.tensor(8.0), batch_size=2)


def test_canary_adam_still_searches_for_gpus_in_each_step(monkeypatch: pytest.MonkeyPatch):
    searches = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: searches.append(1) or False)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight], fused=True).step()
    assert searches
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" in inspect.getsource(lightning.fabric)


def test_without_gpus_torch_searches_for_them_once(monkeypatch: pytest.MonkeyPatch):
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        compat.search_gpus_once()
        assert ("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ) is has_gpu


class Clipped(Net):
    """Moves by at most its clipped gradient in each step, with one kernel."""

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), 1.0, fused=True))
        self.moved: list[float] = []

    def on_train_batch_start(self, batch, batch_idx):
        self.before = torch.nn.utils.parameters_to_vector(self.parameters()).detach()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        after = torch.nn.utils.parameters_to_vector(self.parameters()).detach()
        self.moved.append((after - self.before).norm().item())


class ClippedByItself(Clipped):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")


@pytest.mark.parametrize(
    ("module", "value", "precision"),
    [
        (Clipped, 1e-3, "16-mixed"),
        (ClippedByItself, None, "16-mixed"),
        (Clipped, 1e-3, "bf16-mixed"),
    ],
)
def test_mixed_precision_clips_the_gradients_of_a_fused_optimizer(
    tmp_path: Path, module: type[Clipped], value: float | None, precision: Any
):
    """Its scaler is the one of a GPU. Gradients that are clipped before would hardly move it."""
    options = {"gradient_clip_val": value, "plugins": [MixedPrecision(precision, "cpu")]}
    (run,) = fit(tmp_path, module, callbacks=lambda: [LossGuard(8)], **options)
    assert len(run.module.moved) == 8
    assert max(run.module.moved) == pytest.approx(1e-3, rel=0.01)
    assert [size for size in run.module.moved if 0 < size < 9e-4] == []


def test_canary_lightning_still_clips_no_fused_optimizer_with_16_mixed():
    trainer = tiny_trainer(gradient_clip_val=1.0, plugins=[MixedPrecision("16-mixed", "cpu")])
    with pytest.raises(RuntimeError, match="Are you using a 'fused' optimizer"):
        trainer.fit(Clipped(), batches())


def tiny_trainer(**flags: object) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, **flags,
    )  # fmt: skip


class Means(L.LightningModule):
    """Logs the mean of each batch: nan for an empty one, as every mean of a loss is."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("mean", batch.mean())


@pytest.mark.parametrize(("is_patched", "mean"), [(False, float("nan")), (True, 3.0)])
def test_a_batch_without_samples_is_left_out_of_a_mean(monkeypatch, is_patched: bool, mean: float):
    """Without the patch, it is the canary."""
    update = inspect.unwrap(_ResultMetric.update)
    monkeypatch.setattr(_ResultMetric, "update", update)
    if is_patched:
        epoch_logs.leave_out_empty_batches()
    batches = [torch.full((size,), value) for size, value in ((3, 2.0), (1, 6.0), (0, 0.0))]
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    (metrics,) = trainer.validate(Means(), DataLoader(batches, batch_size=None), verbose=False)
    assert metrics == pytest.approx({"mean": mean}, nan_ok=True)


class Positional(L.LightningDataModule):
    def predict_dataloader(self):
        return DataLoader(torch.ones(10, 32), 4, False)


@pytest.mark.parametrize("is_patched", [True, False])
def test_a_loader_may_take_its_arguments_by_position(monkeypatch, is_patched: bool):
    """Without the patch, it is the canary."""
    name = "_get_dataloader_init_args_and_kwargs"
    monkeypatch.setattr(data, name, inspect.unwrap(getattr(data, name)))
    if is_patched:
        compat.name_arguments_of_loaders.__wrapped__()
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    fails = pytest.raises(MisconfigurationException, match="more than one `__init__` argument")
    with nullcontext() if is_patched else fails:
        found = trainer.predict(BoringModel(), datamodule=Positional())
        assert [len(batch) for batch in found] == [4, 4, 2]


class LeavesOut(Net):
    """Leaves out its last layer in the last step of rank 1, or has a loss of nothing there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.automatic_optimization = way != "manual"
        self.extra = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_last = self.trainer.is_last_batch and self.global_rank == 1
        if not is_last:
            loss = loss + self.extra(flat(batch)[:, None]).mean()
        elif self.way == "nothing":
            loss = torch.zeros((), requires_grad=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def leave_out(folder: str, way: str) -> None:
    fit(Path(folder), lambda: LeavesOut(way), max_epochs=1, timeout_s=60.0)


@pytest.mark.program
@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("manual", "extra.weight, extra.bias"),
        ("nothing", "body.weight, body.bias, head.weight, head.bias, extra.weight and 1 more"),
    ],
)
def test_parameters_that_one_rank_leaves_out_are_named(tmp_path: Path, way: str, names: str):
    done = on_ranks(leave_out, str(tmp_path), way)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"without a gradient, and DDP waits for them: {names}; use" in done.stderr
    assert "strategy=ddp_find_unused_parameters_true" in done.stderr
    assert "Traceback" not in done.stderr


UNFINISHED = """
import time
import torch
from torch import distributed as dist
from samestep.ranks import process_group

dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
is_first = dist.get_rank() == 0
groups = [None, dist.new_group()]
if not is_first:
    store.get("forgotten")
    time.sleep(0.5)  # the first rank destroys its groups now
for group in groups:
    dist.all_reduce(torch.ones(1), group=group, async_op=True)
del groups, group
if is_first:
    store.set("forgotten", "")
process_group.destroy_groups()
print("ended")
"""


@pytest.mark.program
def test_a_group_ends_whose_thread_needs_the_gil():
    # Only the thread has the tensor still. Before torch 2.8, dist.destroy_process_group never ends.
    assert run_code(UNFINISHED, nodes=(2,)).stdout.split() == ["ended", "ended"]
