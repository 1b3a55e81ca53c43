"""Whole runs, started as a user starts them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from library.tests.programs import PATIENCE_S, until
from samestep.run import lock
from samestep.run.record import read
from tests.conftest import (
    NO_PICTURES,
    QUICK,
    REFERENCE,
    ROOT,
    environment,
    final_metrics,
    run,
    run_ranks,
)
from tests.project.test_train import history, record, recorded

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.program
def test_a_finished_run_is_left_alone(digits_run: Path):
    def times() -> dict[Path, int]:
        """When each file was written, but for the one that is locked."""
        files = {path: path.stat().st_mtime_ns for path in digits_run.rglob("*")}
        return {path: time for path, time in files.items() if path.name != lock.FILE}

    before = times()
    result = run("train.py", *QUICK, f"run_root={digits_run.parent}", RUN_ID="digits")
    assert result.returncode == 0
    assert "finished" in result.stdout
    assert times() == before


@pytest.mark.program
def test_another_configuration_is_not_continued(digits_run: Path):
    overrides = [*QUICK, "model=mlp", f"run_root={digits_run.parent}"]
    result = run("train.py", *overrides, RUN_ID="digits")
    assert result.returncode == 2
    assert "model.net._target_" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.program
def test_two_ranks_of_torchrun_see_and_learn_what_one_rank_does(
    reference_run: Path, tmp_path: Path
):
    """Ranks that train.py starts itself: tests/project/test_topology.py."""
    overrides = [*REFERENCE, "cluster=k8s", f"run_root={tmp_path}"]
    done = run(*TORCHRUN, "train.py", *overrides, *record(tmp_path / "records"), RUN_ID="two")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records", "two"]
    assert (tmp_path / "two/logs/rank-1.log").exists()
    for stage in ("train", "val", "test"):
        expected = recorded(reference_run.parent / "records", stage)
        assert recorded(tmp_path / "records", stage) == expected, stage
    ranks = [torch.load(tmp_path / f"records/weights-{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in ranks[0])
    two, one = (final_metrics(path) for path in (tmp_path / "two", reference_run))
    assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.program
def test_ranks_without_a_run_id_share_one_directory(tmp_path: Path):
    overrides = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", f"run_root={tmp_path}"]
    result = run_ranks("train.py", *QUICK, NO_PICTURES, "model=mlp", *overrides)
    assert result.returncode == 0, result.stderr
    (run_dir,) = tmp_path.iterdir()
    assert run_dir.name != "none"
    assert (run_dir / "metrics.json").exists()


@pytest.mark.program
def test_a_grid_whose_driver_is_killed_equals_a_loop_in_a_shell(tmp_path: Path):
    words = [
        *QUICK, NO_PICTURES, "trainer.max_epochs=1", "model=mlp", "trainer.devices=2",
        "trainer.limit_train_batches=2",
    ]  # fmt: skip
    grid = ["train.py", "-m", *words, "seed=1,2", f"run_root={tmp_path}"]
    first = subprocess.Popen(
        [sys.executable, *grid], cwd=ROOT, env=environment(RUN_ID="mine"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until(lambda: (tmp_path / "mine-seed-1/config.yaml").exists())
    first.kill()
    first.wait(PATIENCE_S)

    again = run(*grid, RUN_ID="mine")
    assert again.returncode == 0, again.stdout + again.stderr
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["grids", "mine-seed-1", "mine-seed-2"]
    looped = run("train.py", *words, "seed=2", f"run_root={tmp_path / 'loop'}", RUN_ID="two")
    assert looped.returncode == 0, looped.stderr
    assert final_metrics(tmp_path / "mine-seed-2") == final_metrics(tmp_path / "loop/two")
    for number in (1, 2):
        status = read(tmp_path / f"mine-seed-{number}")
        assert (status.state, len(status.starts)) == ("finished", 1)
        assert status.start["world_size"] == 2

    finished = run(*grid, RUN_ID="mine")
    assert finished.stdout.splitlines() == [
        "Grid mine: 2 of 2 runs are finished", "Compare its runs:",
        f"  samestep runs {tmp_path} --grid mine",
    ]  # fmt: skip


@pytest.mark.program
def test_the_next_line_of_a_finished_run_trains_it_further(tmp_path: Path):
    command = ["train.py", *QUICK[1:], "model=mlp", "model/lr_scheduler=one_cycle"]
    command += [f"run_root={tmp_path}", "report=false"]
    first = run(*command, "trainer.max_epochs=1", RUN_ID="mine")
    assert first.returncode == 0, first.stderr
    words = first.stdout.splitlines()[-1].split()
    assert words[:3] == ["RUN_ID=mine", "python", "train.py"]
    again = run(*words[2:], RUN_ID="mine")
    assert again.returncode == 0, again.stderr
    assert "Continuing: " in again.stdout
    assert re.search(r"epochs +2\n", again.stdout)
    rows = history(tmp_path / "mine")
    assert len([row for row in rows if row["val/accuracy"]]) == 2
    assert len([row for row in rows if row["test/accuracy"]]) == 1
    assert json.loads((tmp_path / "mine/metrics.json").read_text())["test/accuracy"] > 0
