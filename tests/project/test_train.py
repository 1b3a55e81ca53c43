"""Whole runs, started as a user starts them."""

import csv
import json
import re
import signal
from pathlib import Path

import pytest
import torch
import yaml

from tests.conftest import QUICK, final_metrics, run


def history(run_dir: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv without the columns that measure time."""
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    measured = r"time/.*|system/.*|.*_per_second"
    return [{k: v for k, v in row.items() if not re.fullmatch(measured, k)} for row in rows]


def record(directory: Path) -> list[str]:
    """Overrides that add the recorder of ``tests/recorder.py``."""
    node = "+callbacks.recorder"
    return [f"{node}._target_=tests.recorder.Recorder", f"{node}.dirpath={directory}"]


def recorded(directory: Path, stage: str) -> list[list[int]]:
    """Ids of each global batch, put together from all ranks."""
    ranks = [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]
    batches = [[line["ids"] for line in rank if line["stage"] == stage] for rank in ranks]
    return [[id for part in parts for id in part] for parts in zip(*batches, strict=True)]


def test_a_run_leaves_what_the_readme_promises(digits_run: Path):
    names = {path.relative_to(digits_run).as_posix() for path in digits_run.rglob("*.*")}
    assert names >= {
        "config.yaml", "run.json", "metrics.json", "metrics.csv", "checkpoints/best.ckpt",
        "checkpoints/last.ckpt", "logs/rank-0.log",
        "predictions/grid.csv", "predictions/confusion_matrix.csv", "predictions/guesses.csv",
    }  # fmt: skip
    final = final_metrics(digits_run)
    assert {f"{s}/{m}" for s in ("train", "val", "test") for m in ("loss", "accuracy")} == set(
        final
    )
    assert not any("per_second" in name for name in final)
    assert yaml.safe_load((digits_run / "config.yaml").read_text())["data"]["num_classes"] == 10
    last = torch.load(digits_run / "checkpoints/last.ckpt", weights_only=True)
    assert (last["epoch"], last["global_step"]) == (2, 40)


def test_a_run_says_how_it_goes_and_what_to_do_next(digits_run: Path):
    said = (digits_run.parent / "stdout.txt").read_text()
    assert re.search(r"epoch 2/2 .* loss \d.* accuracy \d.* samples/s", said)
    assert re.search(r"test/accuracy +0\.\d+", said)
    assert f"samestep evaluate {digits_run}" in said
    warnings = (digits_run.parent / "stderr.txt").read_text().splitlines()
    # That an older Lightning takes its steps more slowly is one line.
    assert [line for line in warnings if "Lightning's own loop" not in line] == []


@pytest.mark.program
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path):
    overrides = [*QUICK, "trainer.max_epochs=4", "model=mlp", "model.net.dropout=0.2"]
    # A save within an epoch would leave less to repeat.
    overrides.append("callbacks.checkpoints.every_s=300")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = run(
        "train.py", *overrides, *record(tmp_path / "a"), f"run_root={tmp_path}", RUN_ID="whole"
    )
    assert first.returncode == 0, first.stderr
    command = ["train.py", *overrides, *record(tmp_path / "b"), f"run_root={tmp_path}"]
    result = run(*command, RUN_ID="killed", KILL_AT="50")
    assert result.returncode == -signal.SIGKILL
    assert not (killed / "metrics.json").exists()
    result = run(*command, RUN_ID="killed")
    assert result.returncode == 0, result.stderr
    assert "Continuing" in result.stdout
    assert final_metrics(killed) == final_metrics(whole)
    assert history(killed) == history(whole)
    weights = [torch.load(tmp_path / name / "weights-0.pt") for name in "ab"]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    steps = recorded(tmp_path / "a", "train")
    # Where a step is faster than the disk, the save of step 40 may have been cut off.
    assert recorded(tmp_path / "b", "train") in (steps[40:], steps[20:])


@pytest.mark.program
def test_the_default_learns_the_digits(tmp_path: Path):
    result = run("train.py", f"run_root={tmp_path}", RUN_ID="default")
    assert result.returncode == 0, result.stderr
    assert final_metrics(tmp_path / "default")["test/accuracy"] >= 0.97
