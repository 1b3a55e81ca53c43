"""A signal stops a run between two optimizer steps, whoever says how many batches a step has."""

import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import TensorDataset

from library.tests.callbacks.interrupted import check_exact
from samestep.data.loader import BatchLoader
from tests.conftest import run

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")


def batches() -> BatchLoader:
    """Ten batches, of which the loader does not know that they are accumulated."""
    return BatchLoader(TensorDataset(torch.arange(20.0)[:, None]), 2, shuffle=True)


def test_a_run_stops_after_a_whole_optimizer_step(tmp_path: Path):
    # An epoch has the steps 0-2, 3-5, 6-8 and 9, the last one of a single batch.
    stops = [(0, 0), (0, 4), (0, 8), (0, 9), (1, 4), (1, 6)]
    _, parts = check_exact(tmp_path, batches, *stops, accumulate_grad_batches=3)
    assert [len(part.seen) for part in parts] == [3, 3, 3, 1, 6, 3, 1]


def test_a_stop_leaves_the_accumulation_of_an_epoch_as_it_is(tmp_path: Path):
    def schedule() -> list:
        return [GradientAccumulationScheduler({0: 2, 1: 4})]

    _, parts = check_exact(tmp_path, batches, (0, 2), (1, 0), (1, 4), callbacks=schedule)
    assert [len(part.seen) for part in parts] == [4, 10, 4, 2]


SKELETON = [
    "train.py", "data=skeleton", "model=skeleton", "callbacks.checkpoints.monitor=val/loss",
    "callbacks.checkpoints.mode=min",
    "trainer.accumulate_grad_batches=3", "trainer.max_epochs=2", "trainer.devices=2",
    "trainer.accelerator=cpu", "report=false", "+callbacks.quiet._target_=tests.signaller.Quiet",
]  # fmt: skip


def test_two_ranks_stop_after_a_whole_optimizer_step(tmp_path: Path):
    """Batch 0 of epoch 1 gets the signal on one rank; both train on batches 1 and 2 too."""
    for run_id, fault in ("whole", "-1 0 0 rank"), ("stopped", f"4 {signal.SIGTERM:d} 1 rank"):
        where = f"+callbacks.quiet.dirpath={tmp_path / run_id}"
        command = [*SKELETON, where, f"run_root={tmp_path / 'runs'}"]
        done = run(*command, RUN_ID=run_id, SIGNAL_AT=fault)
        if run_id == "stopped":
            assert done.returncode == 143, done.stderr
            assert "Stopped by SIGTERM after step 5; saved." in done.stdout
            done = run(*command, RUN_ID=run_id)
        assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        whole, ours = (
            torch.load(tmp_path / name / f"weights-{rank}.pt") for name in ("whole", "stopped")
        )
        assert all(torch.equal(whole[key], ours[key]) for key in whole)
