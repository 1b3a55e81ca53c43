"""Searches as processes that are killed, stopped and continued; their trials are stand-ins."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from library.tests.programs import PATIENCE_S, until
from samestep.run import record
from tests.conftest import ROOT, environment, run, run_code

pytestmark = pytest.mark.program

SWEEP = str(ROOT / "tests/stand_ins/sweep.py")
WORDS = ["sweep=digits_lr", "sampler.n_startup_trials=100", "trainer.max_epochs=4"]
KEEP_ALL = "pruner._target_=optuna.pruners.NopPruner"


def study_of(folder: Path) -> optuna.Study:
    backend = JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name=folder.name, storage=JournalStorage(backend))


def states(folder: Path) -> list[str]:
    return [trial.state.name for trial in study_of(folder).trials]


def search(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(SWEEP, *WORDS, f"run_root={root}", *words, **variables)


def begin(root: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SWEEP, *WORDS, f"run_root={root}", *words],
        cwd=ROOT, env=environment(**variables), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def starts_of(run_dir: Path) -> list[str]:
    """The overrides of each start of a run."""
    return [line.partition(" ")[2] for line in (run_dir / "starts.txt").read_text().splitlines()]


def test_a_killed_search_continues_its_trials_and_starts_none_twice(tmp_path: Path):
    """The stand-in fails where another process of its run is at work, and so would its trial."""
    folder, gate = tmp_path / "sweeps/digits-lr", tmp_path / "gate"
    words = ["n_trials=4", "trials_at_once=2", KEEP_ALL]
    with begin(tmp_path, *words, FAKE_GATE=str(gate)) as first:
        until(lambda: len(list(tmp_path.glob("digits-lr-*/metrics.csv"))) == 2)
        first.kill()
    (tmp_path / "polled").unlink(missing_ok=True)
    assert states(folder) == ["RUNNING"] * 2
    with suppress(FileExistsError):  # it may really have been killed while it wrote
        (folder / "journal.log.lock").symlink_to("journal.log")
    with (folder / "journal.log").open("a") as file:
        file.write('{"op_code": 4, "wor')  # the disk was full
    with begin(tmp_path, *words, FAKE_GATE=str(gate)) as second:
        assert "0 of 4 trials have ended" in second.stdout.readline()
        until((tmp_path / "polled").exists)
        assert [len(starts_of(run_dir)) for run_dir in tmp_path.glob("digits-lr-*")] == [1, 1]
        gate.touch()
        out, err = second.communicate(timeout=PATIENCE_S)
    assert (second.returncode, err) == (0, ""), out
    assert states(folder) == ["COMPLETE"] * 4
    assert len({str(trial.params) for trial in study_of(folder).trials}) == 4
    for number in range(4):
        starts = starts_of(tmp_path / f"digits-lr-{number}")
        assert len(starts) == (2 if number < 2 else 1)
        assert len(set(starts)) == 1  # the same values
        rows = (tmp_path / f"digits-lr-{number}/metrics.csv").read_text().splitlines()[1:]
        assert [row.split(",")[0] for row in rows] == ["0", "1", "2", "3"]

    other = search(tmp_path, *words, "seed=1")
    assert other.returncode == 2
    assert "holds a search with [] instead of ['seed=1']; use the old values, or" in other.stderr


def test_ctrl_c_stops_the_trials_and_prints_the_command_that_resumes(tmp_path: Path):
    folder = tmp_path / "sweeps/mine"
    words = ["n_trials=3", "trials_at_once=2", KEEP_ALL]
    with begin(tmp_path, *words, FAKE_SLEEP_S="900", RUN_ID="mine") as first:
        until(lambda: len(list(tmp_path.glob("mine-*/starts.txt"))) == 2)
        second = search(tmp_path, *words, RUN_ID="mine")
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does
        out, err = first.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert re.match(r"error: \S+ is in use by process \d+ on ", second.stderr)
    assert (first.returncode, err) == (130, "")
    assert "To continue:\n  RUN_ID=mine samestep sweep sweep=digits_lr" in out
    assert states(folder) == ["RUNNING", "RUNNING"]
    for run_dir in tmp_path.glob("mine-*"):
        with (run_dir / "claim").open() as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process holds it

    done = search(tmp_path, *words, RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    assert states(folder) == ["COMPLETE"] * 3


def test_bad_trials_end_early_and_the_search_goes_on(tmp_path: Path):
    """Each trial is killed once; what is nan fails, what is bad is pruned."""
    words = ["n_trials=6", "pruner={_target_: optuna.pruners.ThresholdPruner, lower: 0.9975}"]
    done = search(tmp_path, *words, FAKE_FAULT="killed nan waits")
    assert done.returncode == 0, done.stderr
    for trial in study_of(tmp_path / "sweeps/digits-lr").trials:
        lr, reason = trial.params["model.optimizer.lr"], trial.user_attrs["reason"]
        if lr > 0.01:
            assert (trial.state.name, reason) == ("FAIL", "val/accuracy is nan or infinite")
        elif lr > 0.0025:
            assert (trial.state.name, reason) == ("PRUNED", "after validation 1")
            status = record.read(tmp_path / f"digits-lr-{trial.number}")
            assert (status.state, status.why) == ("stopped", "pruned after validation 1")
        else:
            assert trial.state.name == "COMPLETE"
            assert trial.value == pytest.approx(1 - lr + 0.003, abs=1e-6)
        assert len(starts_of(tmp_path / f"digits-lr-{trial.number}")) == 2
    assert {*states(tmp_path / "sweeps/digits-lr")} == {"FAIL", "PRUNED", "COMPLETE"}


def test_a_trial_that_fails_says_why_and_the_best_one_can_be_run(tmp_path: Path):
    words = [
        "n_trials=4", "model.optimizer.lr=choice(0.1,1e-3)", "data.global_batch_size=16",
        "model.optimizer.weight_decay=0",
    ]  # fmt: skip
    done = search(tmp_path, *words, FAKE_FAULT="crash")
    assert done.returncode == 0, done.stderr
    assert "failed: exit code 1: the loss is infinite" in done.stdout
    trials = study_of(tmp_path / "sweeps/digits-lr").trials
    assert {(t.state.name, t.params["model.optimizer.lr"]) for t in trials} >= {
        ("COMPLETE", 0.001), ("FAIL", 0.1),
    }  # fmt: skip
    command = done.stdout.splitlines()[-1]
    assert command.startswith("  python train.py model.optimizer.weight_decay=0 data.global_batch")
    assert command.endswith(" model.optimizer.lr=0.001")

    failed = search(tmp_path, "n_trials=1", FAKE_FAULT="always", RUN_ID="other")
    assert failed.returncode == 1
    assert "0 complete, 0 pruned, 1 failed; what they have printed" in failed.stdout


LITTLE_SPACE = """
import os, resource, runpy, sys
# The limit would cut the bytecode that Python, here and in a trial, writes beside new sources. Set
# here, because a program that starts with this variable is no fork of the fork server.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_a_full_disk_is_one_message(tmp_path: Path):
    """The journal may have 1,024 bytes, and each trial writes more."""
    done = run_code(LITTLE_SPACE, SWEEP, *WORDS, f"run_root={tmp_path}", "n_trials=2")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot be written: File too large; mend that, and repeat the" in done.stderr
