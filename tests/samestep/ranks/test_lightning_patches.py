"""Canaries: tests that fail once a library no longer needs, or no longer has, what we patch."""

import inspect

import lightning as L
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from samestep.ranks import lightning_patches


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


def test_between_steps_no_batch_is_begun():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    progress = trainer.fit_loop.epoch_loop.batch_progress
    progress.increment_ready()
    with lightning_patches.between_steps(trainer):
        assert (progress.current.ready, progress.total.ready) == (0, 0)
    assert (progress.current.ready, progress.total.ready) == (1, 1)
