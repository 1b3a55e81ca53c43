"""Canaries: tests that fail once a library no longer needs, or no longer has, what we patch."""

import inspect
import os
from inspect import getfullargspec as real
from pathlib import Path

import lightning as L
import lightning.fabric
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call as trainer_call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.utils.data import DataLoader

from samestep.ranks import lightning_patches
from tests.samestep.callbacks.tiny import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*")


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


def tiny_trainer(**flags: object) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, **flags,
    )  # fmt: skip


BATCHES = DataLoader(torch.ones(4, 2), batch_size=2)


def test_between_steps_no_batch_is_begun():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    progress.increment_ready()
    with lightning_patches.between_steps(trainer):
        assert (progress.current.ready, progress.total.ready) == (0, 0)
    assert (progress.current.ready, progress.total.ready) == (1, 1)


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


class Named(Tiny):
    """Notes under which hook each of its methods runs, as ``log`` needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.names.append(self._current_fx_name)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: object) -> None:
        self.names.append(self._current_fx_name)


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_hooks_that_are_called_directly_have_a_name(profiler: str | None):
    lightning_patches.call_hooks_directly()
    lightning_patches.call_hooks_directly()
    module = Named()
    seen: list[str] = []
    callback = LambdaCallback(on_train_batch_start=lambda *_: seen.append(module._current_fx_name))
    callback.on_train_batch_end = None  # Lightning leaves out what cannot be called
    trainer = tiny_trainer(callbacks=[callback], profiler=profiler)
    trainer.fit(module, BATCHES)
    assert module.names == ["training_step", "on_train_batch_end"] * 2
    assert seen == ["on_train_batch_start"] * 2
    assert module._current_fx_name is None
    sections = getattr(trainer.profiler, "recorded_durations", {})
    assert ("[LightningModule]Named.on_train_batch_end" in sections) is (profiler is not None)


def test_canary_lightning_still_announces_its_hooks():
    source = Path(trainer_call.__file__).read_text()
    for text in (
        'log.debug(f"{trainer.__class__.__name__}: calling lightning module hook: {hook_name}")',
        "pl_module._current_fx_name = hook_name",
        "for callback in callbacks:\n        fn = getattr(callback, hook_name)",
        "fn = getattr(pl_module, hook_name)\n    if not callable(fn):\n        return None",
        "fn(trainer, trainer.lightning_module, *args, **kwargs)",
        "fn = getattr(trainer.strategy, hook_name)",
    ):
        assert text in source


class Short(Tiny):
    """Takes no number of the batch."""

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return super().training_step(batch, 0)


class Data(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.num_moved = 0

    def train_dataloader(self) -> DataLoader:
        return BATCHES

    def transfer_batch_to_device(self, batch: torch.Tensor, *_: object) -> torch.Tensor:
        self.num_moved += 1
        return batch


def test_hooks_that_are_looked_at_once_are_those_of_each_run(monkeypatch: pytest.MonkeyPatch):
    lightning_patches.look_at_hooks_once()
    lightning_patches.look_at_hooks_once()
    looks = []
    monkeypatch.setattr(inspect, "getfullargspec", lambda f: looks.append(f) or real(f))
    data = Data()
    for module in (Tiny(), Short(), Tiny()):
        tiny_trainer().fit(module, datamodule=data)
        tiny_trainer().fit(module, BATCHES)
    assert data.num_moved == 6
    # Lightning looks at bound methods too, but not in each step.
    steps = [look for look in looks if inspect.isfunction(look)]
    assert steps == [Tiny.training_step, Short.training_step]


def test_canary_lightning_still_looks_at_its_hooks_in_each_step():
    source = inspect.getsource(training_epoch_loop._TrainingEpochLoop._build_kwargs)
    assert "is_param_in_hook_signature(training_step_fx," in source
    assert "get_instance(hook_name)" in inspect.getsource(L.LightningModule._call_batch_hook)
