"""Drivers of a grid that are killed, stopped and repeated; their jobs are stand-ins."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.grid.drive import make_grid
from library.tests.programs import PATIENCE_S, ROOT, environment, run, until
from samestep.grid import driver, jobs


def begin(root: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "library.tests.grid.drive", str(root), *words],
        cwd=ROOT, env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def drive(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "library.tests.grid.drive", str(root), *words)


def starts(root: Path) -> list[str]:
    """The runs in order of their starts."""
    path = root / "starts.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def outcome(root: Path, name: str) -> jobs.Outcome:
    return jobs.read_outcome(root / "grids/mine", name)


@pytest.mark.program
def test_a_job_that_fails_does_not_stop_the_others(tmp_path: Path):
    words = ["bad", "a", "killed", "b"]
    done = drive(tmp_path, *words)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    assert sorted(starts(tmp_path)) == ["a", "b", "bad", "killed", "killed"]
    assert "[a] hello from a\n" in done.stdout
    assert "killed: was killed, and starts again" in done.stdout
    assert "failed: [('bad', 'exit code 1: the loss is infinite')]" in done.stdout
    assert [outcome(tmp_path, name).exit_code for name in words] == [1, 0, 0, 0]

    again = drive(tmp_path, *words, "c")
    assert again.returncode == 1
    assert "Grid mine: 3 of 5 runs are finished" in again.stdout
    assert sorted(starts(tmp_path)[5:]) == ["bad", "c"]
    # The same run, started by hand with other values, no longer has what the grid asked for.
    (tmp_path / "a/run.json").unlink()
    assert "[a] hello from a\n" in drive(tmp_path, "a").stdout


@pytest.mark.program
def test_a_job_that_is_always_killed_fails(tmp_path: Path):
    done = drive(tmp_path, "always-killed")
    assert done.returncode == 1
    assert starts(tmp_path) == ["always-killed"] * 3
    assert "exit code -9" in done.stdout


@pytest.mark.program
def test_a_failure_stops_the_others_if_asked(tmp_path: Path):
    done = drive(tmp_path, "waits", "bad", "never", "--stop")
    assert done.returncode == 1
    # The first may be told to end before it can leave its line.
    assert "never" not in starts(tmp_path)
    assert "failed: [('bad', " in done.stdout


@pytest.mark.program
def test_sigterm_stops_the_jobs_and_the_same_command_continues(tmp_path: Path):
    with begin(tmp_path, "waits-1", "waits-2", "a") as first:
        until(lambda: len(starts(tmp_path)) == 2)
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=PATIENCE_S)
    assert (first.returncode, err) == (143, ""), out
    assert "SIGTERM: the runs save and end ...\n" in out
    assert out.endswith("failed: []\n")
    (tmp_path / "gate").touch()
    done = drive(tmp_path, "waits-1", "waits-2", "a")
    assert done.returncode == 0
    assert "Grid mine: 0 of 3 runs are finished" in done.stdout
    assert sorted(starts(tmp_path)) == ["a", "waits-1", "waits-1", "waits-2", "waits-2"]


@pytest.mark.program
def test_a_driver_after_a_killed_one_waits_for_its_jobs(tmp_path: Path):
    """The stand-in fails where another process of its run is at work."""
    words = ["waits-1", "waits-2", "a", "b"]
    with begin(tmp_path, *words) as first:
        until(lambda: len(starts(tmp_path)) == 2)
        first.kill()
        first.wait(PATIENCE_S)
    (tmp_path / "polled").unlink(missing_ok=True)
    with begin(tmp_path, *words) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "Grid mine: 0 of 4 runs are finished\n"
        # Both places have a job of the first driver.
        assert second.stdout.readline().startswith("Waiting for the runs that an earlier command")
        until((tmp_path / "polled").exists)
        assert second.poll() is None
        assert sorted(starts(tmp_path)) == ["waits-1", "waits-2"]
        (tmp_path / "gate").touch()
        out, err = second.communicate(timeout=PATIENCE_S)
    assert (second.returncode, err) == (0, ""), out
    assert sorted(starts(tmp_path)) == sorted(words)
    assert "waits-1: was trained by another process" in out


@pytest.mark.program
def test_two_drivers_at_once_share_the_jobs(tmp_path: Path):
    words = ["waits-1", *"abcdefgh"]
    with begin(tmp_path, *words) as first, begin(tmp_path, *words) as second:
        # One place is enough for the others, and no third one is made.
        until(lambda: len(starts(tmp_path)) == len(words))
        assert sorted(starts(tmp_path)) == sorted(words)
        (tmp_path / "gate").touch()
        for one in (first, second):
            out, err = one.communicate(timeout=PATIENCE_S)
            assert (one.returncode, err) == (0, ""), out
    places = [line.split()[1] for line in (tmp_path / "starts.txt").read_text().splitlines()]
    assert {*places} == {"0", "1"}
    assert len(starts(tmp_path)) == len(words)


def test_finished_runs_cost_two_small_files_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [f"run-{number}" for number in range(1000)]
    grid = make_grid(tmp_path, names)
    grid.folder.mkdir(parents=True)
    for job in grid.jobs:
        job.run_dir.mkdir()
        status = {"state": "finished", "time": "2026-11-27T01:00:00+00:00"}
        (job.run_dir / "run.json").write_text(json.dumps(status))
        content = jobs.Outcome(job.inputs(), 0)._asdict()
        (grid.folder / f"{job.run_id}.json").write_text(json.dumps(content))
    read = []
    for module in (jobs, jobs.record):
        read_json = module.read_json
        monkeypatch.setattr(
            module, "read_json", lambda path, f=read_json: (read.append(path), f(path))[1]
        )
    assert driver.Driver(grid).run([]) == 0
    assert len(read) == 2000
    assert not (grid.folder / "logs").exists()


@pytest.mark.parametrize(
    ("state", "exit_code", "inputs", "expected"),
    [
        ("finished", 0, "now", True),
        ("finished", 0, "before", False),  # the run itself says whether it may change
        ("finished", 2, "now", False),  # it may not
        ("finished", None, "now", True),  # its driver was killed
        ("stopped", 0, "now", False),  # it trains further, by hand
        (None, 0, "now", False),  # somebody has deleted it
    ],
)
def test_what_is_known_to_be_finished(tmp_path: Path, state, exit_code, inputs, expected):
    job = jobs.Job("one", tmp_path / "one", [], {}, lambda: "now")
    jobs.write_outcome(tmp_path, job._replace(inputs=lambda: inputs), exit_code)
    job.run_dir.mkdir()
    status = {"state": state, "time": "2100-01-01T00:00:00+00:00"}
    if state:
        (job.run_dir / "run.json").write_text(json.dumps(status))
    assert jobs.is_finished(tmp_path, job, is_elsewhere=False) is expected
    if exit_code is None:
        # It was finished before this start, which it may have rejected.
        status["time"] = "2000-01-01T00:00:00+00:00"
        (job.run_dir / "run.json").write_text(json.dumps(status))
        assert not jobs.is_finished(tmp_path, job, is_elsewhere=False)


def test_of_a_run_elsewhere_only_its_outcome_is_known(tmp_path: Path):
    job = jobs.Job("one", tmp_path / "one", [], {}, lambda: "now")
    assert not jobs.is_finished(tmp_path, job, is_elsewhere=True)
    jobs.write_outcome(tmp_path, job, None)
    assert not jobs.is_finished(tmp_path, job, is_elsewhere=True)
    jobs.write_outcome(tmp_path, job, 0)
    assert jobs.is_finished(tmp_path, job, is_elsewhere=True)
