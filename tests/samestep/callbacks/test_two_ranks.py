"""Loaders of other people's styles, on two ranks."""

import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.conftest import run

RUN = [
    "train.py", "data=skeleton", "model=skeleton", "callbacks.best.monitor=val/loss",
    "trainer.max_epochs=2", "trainer.accelerator=cpu", "report=false",
    "+callbacks.signaller._target_=tests.signaller.Signaller",
]  # fmt: skip


def train(
    tmp_path: Path, run_id: str, kind: str, *words: str, fault: str = "-1 0 0 rank", num: int = 2
) -> subprocess.CompletedProcess[str]:
    return run(
        *RUN, f"data._target_=tests.samestep.callbacks.foreign_data.{kind}", *words,
        f"trainer.devices={num}", f"+callbacks.signaller.dirpath={tmp_path / run_id}",
        f"run_root={tmp_path / 'runs'}", RUN_ID=run_id, SIGNAL_AT=fault,
    )  # fmt: skip


def seen(tmp_path: Path, run_id: str, rank: int) -> list[list[str]]:
    """The samples of each batch of the first epoch."""
    lines = (tmp_path / run_id / f"seen-{rank}.txt").read_text().splitlines()
    return [line[2:].strip("[]").split(", ") for line in lines if line.startswith("0 ")]


@pytest.mark.parametrize("kind", ["BatchSamplers", "OwnBatchSamplers"])
def test_each_rank_gets_a_part_of_the_batches(tmp_path: Path, kind: str):
    for num in (1, 2):
        done = train(tmp_path, f"ranks-{num}", kind, "trainer.max_epochs=1", num=num)
        assert done.returncode == 0, done.stderr
    ours = [seen(tmp_path, "ranks-2", rank) for rank in (0, 1)]
    assert [len(batch) for rank in ours for batch in rank] == [30] * 10
    whole = [batch for pair in zip(*ours, strict=True) for batch in pair]
    if kind == "BatchSamplers":
        assert whole == seen(tmp_path, "ranks-1", 0)
    # Some patients have the same progress.
    ids = sorted(sample for batch in whole for sample in batch)
    assert ids == sorted(sample for batch in seen(tmp_path, "ranks-1", 0) for sample in batch)


def test_each_rank_continues_with_the_state_of_its_loader(tmp_path: Path):
    assert train(tmp_path, "whole", "Stateful").returncode == 0
    fault = f"13 {signal.SIGTERM:d} 1 rank"
    stopped = train(tmp_path, "stopped", "Stateful", fault=fault)
    assert stopped.returncode == 143, stopped.stderr
    assert stopped.stdout.count("a loader with a state of its own") == 1
    continued = train(tmp_path, "stopped", "Stateful")
    assert continued.returncode == 0, continued.stderr
    for rank in (0, 1):
        whole, ours = (
            torch.load(tmp_path / name / f"weights-{rank}.pt") for name in ("whole", "stopped")
        )
        assert all(torch.equal(whole[key], ours[key]) for key in whole)
    one = train(tmp_path, "stopped", "Stateful", "trainer.max_epochs=3", num=1)
    assert "of the training loaders of 2 ranks, and 1 ranks cannot" in one.stdout


@pytest.mark.parametrize("freezes", ["true", "false"])
def test_parameters_are_frozen_and_unfrozen_on_all_ranks(tmp_path: Path, freezes: str):
    """DDP would wait for a gradient that does not come, or leave one out."""
    done = train(
        tmp_path, "whole", "Plain", "model._target_=tests.samestep.callbacks.foreign_data.Thaws",
        f"+model.freezes={freezes}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, other = (torch.load(tmp_path / "whole" / f"weights-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(ours[key], other[key]) for key in ours)
