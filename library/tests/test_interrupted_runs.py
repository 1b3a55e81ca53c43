"""The same steps before and after an interruption, and on two ranks.

A few runs are started once and read by all tests. Each is the plain script
``library.tests.small``. ``make test-programs`` has other interruptions and front ends:
``guarantees.py``.
"""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from library.tests.kit import check_same, weights
from library.tests.shared import make_once, session_folder
from library.tests.test_guarantees import Script
from samestep.run import record
from samestep.run.metrics import read_final_metrics

STARTS: dict[str, list[dict[str, Any]]] = {
    "undisturbed": [{}, {}],
    "stopped": [{"AT": "11", "HOW": "SIGTERM"}, {}],
    "killed": [{"AT": "19", "HOW": "SIGKILL"}, {}],
    "two_ranks": [{"devices": 2}],
}
"""Runs, and the options of each of their starts: see ``library.tests.small``."""

INTERRUPTED = ["stopped", "killed"]


class Runs:
    """Directories of finished runs, and how each of their processes ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        return self.folder / "runs" / name

    def ended(self, name: str, number: int) -> CompletedProcess[str]:
        said = json.loads((self.folder / f"{name}-{number}.json").read_text())
        return CompletedProcess([], *said)

    def make(self) -> None:
        start = Script(self.folder)
        for name, starts in STARTS.items():
            for number, options in enumerate(starts):
                # With 64 bits, the order of a sum makes a difference of 1e-15.
                done = start(name, precision="64-true", **options)
                said = [done.returncode, done.stdout, done.stderr]
                (self.folder / f"{name}-{number}.json").write_text(json.dumps(said))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Runs:
    runs = Runs(session_folder(tmp_path_factory, pytestconfig) / "interrupted")
    make_once(runs.folder, runs.make)
    return runs


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("undisturbed", 0, 0),
        ("stopped", 0, 143),
        ("stopped", 1, 0),
        ("killed", 0, -9),
        ("killed", 1, 0),
        ("two_ranks", 0, 0),
    ],
)
def test_exit_code_says_how_a_run_ended(runs: Runs, name: str, number: int, code: int):
    done = runs.ended(name, number)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("name", INTERRUPTED)
def test_weights_and_history_are_bit_identical(runs: Runs, name: str):
    check_same(runs[name], runs["undisturbed"])
    assert weights(runs[name])
    best = weights(runs[name], "best"), weights(runs["undisturbed"], "best")
    torch.testing.assert_close(*best, rtol=0, atol=0)


@pytest.mark.parametrize("name", INTERRUPTED)
def test_final_metrics_are_bit_identical(runs: Runs, name: str):
    """Of the test too, which follows the training."""
    ours, expected = (read_final_metrics(runs[each]) for each in (name, "undisturbed"))
    for metric in ("test/loss", "val/loss", "train/loss"):
        assert ours[metric] == expected[metric]


def test_two_ranks_make_the_same_steps(runs: Runs):
    assert len(list(runs["two_ranks"].glob("logs/rank-*.log"))) == 2
    one, two = weights(runs["undisturbed"]), weights(runs["two_ranks"])
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)


def test_a_stopped_run_says_how_to_continue_it(runs: Runs):
    assert "To continue: " in runs.ended("stopped", 0).stdout
    assert "Continuing: " in runs.ended("stopped", 1).stdout


@pytest.mark.parametrize(
    ("name", "first", "num_starts"),
    [
        ("undisturbed", record.FINISHED, 1),
        ("stopped", record.STOPPED, 2),
        ("killed", record.FINISHED, 2),  # nothing can write how it was killed
    ],
)
def test_the_record_has_each_start_and_end(runs: Runs, name: str, first: str, num_starts: int):
    found = record.read(runs[name])
    assert (found.state, len(found.starts)) == (record.FINISHED, num_starts)
    assert (found.ends[0]["state"], found.ends[-1]["state"]) == (first, record.FINISHED)


def test_repeated_steps_are_compared(runs: Runs):
    for name in ("stopped", "killed"):
        (repeat,) = record.read(runs[name]).repeats
        assert repeat["result"] == "equal"


def test_a_finished_run_is_left_alone(runs: Runs):
    done = runs.ended("undisturbed", 1)
    assert done.returncode == 0
    assert "Nothing to do" in done.stdout


@pytest.mark.parametrize("name", STARTS)
def test_a_run_leaves_what_the_readme_promises(runs: Runs, name: str):
    files = {path.relative_to(runs[name]).as_posix() for path in runs[name].rglob("*.*")}
    promised = {"metrics.json", "metrics.csv", "run.json", "receipts.bin", "time.bin"}
    assert promised | {"checkpoints/best.ckpt", "checkpoints/last.ckpt"} <= files
