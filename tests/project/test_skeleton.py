"""The skeleton: it learns, on any number of ranks, and continues."""

import csv
from pathlib import Path

import torch

from tests.conftest import run

SKELETON = ["data=skeleton", "model=skeleton", "callbacks.checkpoints.monitor=val/loss",
            "callbacks.checkpoints.mode=min", "trainer.accelerator=cpu", "report=false"]  # fmt: skip


def train(root: Path, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    """Train a run, and return the weights of its last checkpoint."""
    done = run("train.py", *SKELETON, f"run_root={root}", *overrides, RUN_ID=name)
    assert done.returncode == 0, done.stderr
    last = torch.load(root / name / "checkpoints/last.ckpt", weights_only=True)
    weights: dict[str, torch.Tensor] = last["state_dict"]
    return weights


def test_it_learns_and_continues_bit_by_bit(tmp_path: Path):
    whole = train(tmp_path, "whole", "trainer.max_epochs=4")
    train(tmp_path, "parts", "trainer.max_epochs=2")
    parts = train(tmp_path, "parts", "trainer.max_epochs=4")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    with (tmp_path / "whole/metrics.csv").open() as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert losses[-1] < 0.8 * losses[0]


def test_two_ranks_learn_what_one_rank_learns(tmp_path: Path):
    one = train(tmp_path, "one", "trainer.max_epochs=1")
    two = train(tmp_path, "two", "trainer.max_epochs=1", "trainer.devices=2")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5)
