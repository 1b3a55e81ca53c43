"""Canaries: tests that fail once a library no longer needs, or no longer has, what we patch."""

import inspect
import os

import lightning as L
import lightning.fabric
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.utils.data import DataLoader

from samestep.ranks import lightning_patches
from tests.samestep.callbacks.tiny import Tiny


def test_canary_lightning_still_talks_to_other_ranks_in_its_handler():
    assert "broadcast" in inspect.getsource(_SignalConnector._sigterm_notifier_fn)
    assert "_signal_connector.register_signal_handlers" in inspect.getsource(
        __import__("lightning.pytorch.trainer.trainer", fromlist=["Trainer"])
    )


def test_canary_lightning_still_broadcasts_every_step():
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_canary_lightning_still_counts_the_step_before_a_validation_again():
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._skip_next_val = True\n                return" in source


def test_canary_torchruns_agent_still_asks_how_its_ranks_are():
    source = inspect.getsource(SimpleElasticAgent._invoke_run)
    assert "self._monitor_workers(self._worker_group)" in source


def test_canary_lightning_still_counts_a_batch_before_its_first_hook():
    source = inspect.getsource(_TrainingEpochLoop.advance)
    ready, hook = source.index("increment_ready()"), source.index('"on_train_batch_start"')
    assert ready < hook < source.index("increment_started()")


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
        lightning_patches.search_gpus_once()
        assert ("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ) is has_gpu


class Counter(L.Callback):
    """Defines one hook of a step, and one that is called once."""

    def __init__(self) -> None:
        self.calls = []

    def on_train_batch_end(self, *args: object) -> None:
        self.calls.append("batch")

    def on_train_end(self, *args: object) -> None:
        self.calls.append("end")


@pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*")
def test_only_the_hooks_that_a_callback_defines_are_called(monkeypatch: pytest.MonkeyPatch):
    counter = Counter()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[counter], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    lightning_patches.skip_empty_hooks(trainer)
    sections: list[str] = []
    monkeypatch.setattr(trainer.profiler, "start", sections.append)
    batches = DataLoader(torch.ones(4, 2), batch_size=2)
    trainer.fit(Tiny(), batches, batches)
    assert counter.calls == ["batch", "batch", "end"]
    hooks = [name.partition("Counter.")[2] for name in sections if "]Counter." in name]
    assert [name for name in hooks if name in lightning_patches.STEP_HOOKS] == [
        "on_train_batch_end", "on_train_batch_end"
    ]  # fmt: skip
    assert "on_train_start" in hooks  # is called once, and costs nothing


def test_hooks_that_an_object_and_not_its_class_defines_are_called():
    calls: list[int] = []
    callback = LambdaCallback(on_train_batch_end=lambda trainer, *_: calls.append(1))
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    lightning_patches.skip_empty_hooks(trainer)
    batches = DataLoader(torch.ones(4, 2), batch_size=2)
    trainer.fit(Tiny(), batches, batches)
    assert calls == [1, 1]


def test_between_steps_no_batch_is_begun():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    progress.increment_ready()
    with lightning_patches.between_steps(trainer):
        assert (progress.current.ready, progress.total.ready) == (0, 0)
    assert (progress.current.ready, progress.total.ready) == (1, 1)


def test_the_name_of_a_hook_is_written_without_torchs_checks(monkeypatch: pytest.MonkeyPatch):
    lightning_patches.name_hooks_without_checks()
    module, layer, names = Tiny(), torch.nn.Linear(2, 2), []
    original = torch.nn.Module.__setattr__
    monkeypatch.setattr(
        torch.nn.Module, "__setattr__",
        lambda self, name, value: names.append(name) or original(self, name, value),
    )  # fmt: skip
    module._current_fx_name = "training_step"
    module.layer = layer
    assert names == ["layer"]
    assert module._current_fx_name == "training_step"
    assert "layer.weight" in module.state_dict()


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
        lightning_patches.leave_out_empty_batches()
    batches = [torch.full((size,), value) for size, value in ((3, 2.0), (1, 6.0), (0, 0.0))]
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    (metrics,) = trainer.validate(Means(), DataLoader(batches, batch_size=None), verbose=False)
    assert metrics == pytest.approx({"mean": mean}, nan_ok=True)


def test_canary_lightning_still_names_each_hook_by_an_attribute():
    from lightning.pytorch.trainer import call

    source = inspect.getsource(call._call_callback_hooks)
    assert "pl_module._current_fx_name = hook_name" in source
