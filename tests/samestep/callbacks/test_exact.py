"""What is kept of each rank when an epoch is interrupted: buffers, sums, random numbers, order."""

import signal
from pathlib import Path

import lightning as L
import pytest
import torch

from samestep.callbacks.exact import AverageBuffers, float_buffers, sums_of
from samestep.callbacks.sums import Sums
from tests.conftest import NO_PICTURES, QUICK, final_figures, run

# Batch norm keeps statistics of each rank's own images; dropout would hide nothing.
NORM = [
    *QUICK, NO_PICTURES, "model=resnet18", "model.net.width=2", "model/lr_scheduler=warmup_cosine",
    "trainer.limit_train_batches=6",
]  # fmt: skip


def train(tmp_path: Path, run_id: str, *overrides: str, fault: str = ""):
    node = "+callbacks.signaller"
    signaller = [f"{node}._target_=tests.signaller.Quiet", f"{node}.dirpath={tmp_path / run_id}"]
    return run(
        "train.py", *NORM, *overrides, *signaller, f"run_root={tmp_path / 'runs'}",
        RUN_ID=run_id, SIGNAL_AT=fault or "-1 0 0 rank",
    )  # fmt: skip


@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_and_sums_of_each_rank_survive_an_interrupted_epoch(tmp_path: Path, devices: int):
    words = [f"trainer.devices={devices}"]
    assert train(tmp_path, "whole", *words).returncode == 0
    fault = f"9 {signal.SIGTERM:d} {devices - 1} rank"
    stopped = train(tmp_path, "stopped", *words, fault=fault)
    assert stopped.returncode == 143, stopped.stderr
    continued = train(tmp_path, "stopped", *words)
    assert continued.returncode == 0, continued.stderr
    for rank in range(devices):
        whole, ours = (
            torch.load(tmp_path / name / f"weights-{rank}.pt") for name in ("whole", "stopped")
        )
        assert all(torch.equal(whole[key], ours[key]) for key in whole)
    whole, stopped = (final_figures(tmp_path / "runs" / name) for name in ("whole", "stopped"))
    assert whole == stopped


def test_counters_and_empty_buffers_have_no_mean():
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2), Sums("train", "loss"))
    assert [tuple(buffer.shape) for buffer in float_buffers(module)] == [(2,), (2,)]
    assert list(sums_of(module)) == ["1"]


def test_a_rank_with_more_samples_counts_more_in_the_mean_of_buffers():
    """When a run continues on another number of ranks, within an epoch."""
    module = torch.nn.BatchNorm1d(2)
    average = AverageBuffers()
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.state.fn = "fit"
    of_ranks = [[torch.full((2,), value), torch.ones(2)] for value in (1.0, 4.0)]
    for weights, mean in (({"weights_of_ranks": [0.5, 1.5]}, 3.25), ({}, 2.5)):
        average.on_load_checkpoint(trainer, module, {"buffers_of_ranks": of_ranks, **weights})
        average.on_train_start(trainer, module)
        assert module.running_mean.tolist() == [mean, mean]
