"""Searches as processes that are killed, stopped and continued; their trials are stand-ins."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from samestep.sweep.search import POLL_S
from samestep.sweep.trial_process import TrialProcess
from tests.conftest import ROOT, environment, run, run_code

SWEEP = str(ROOT / "tests/stand_ins/sweep.py")
TRIAL = ROOT / "tests/stand_ins/trial.py"
WORDS = ["sweep=digits_lr", "sampler.n_startup_trials=100", "trainer.max_epochs=4"]
KEEP_ALL = "pruner._target_=optuna.pruners.NopPruner"


def study_of(folder: Path) -> optuna.Study:
    backend = JournalFileBackend(str(folder / "journal.log"))
    return optuna.load_study(study_name=folder.name, storage=JournalStorage(backend))


def states(folder: Path) -> list[str]:
    return [trial.state.name for trial in study_of(folder).trials]


def search(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(SWEEP, *WORDS, f"run_root={root}", *words, timeout=120, **variables)


def begin(root: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SWEEP, *WORDS, f"run_root={root}", *words],
        cwd=ROOT, env=environment(**variables), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_until(is_so: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def starts_of(run_dir: Path) -> list[tuple[int, str]]:
    """The process id and the overrides of each start of a run."""
    lines = (run_dir / "starts.txt").read_text().splitlines()
    return [(int(line.partition(" ")[0]), line.partition(" ")[2]) for line in lines]


def test_a_search_that_is_killed_goes_on_with_the_same_trials(tmp_path: Path):
    """8 trials, none twice: those that were begun are continued, with their values."""
    folder = tmp_path / "sweeps/digits-lr"
    words = ["n_trials=8", "trials_at_once=2", KEEP_ALL]
    with begin(tmp_path, *words, FAKE_SLEEP_S="0.15") as first:
        wait_until(lambda: len(list(folder.glob("digits-lr-*/metrics.csv"))) >= 4)
        first.kill()
    unfinished = [t.number for t in study_of(folder).trials if t.state is TrialState.RUNNING]
    assert unfinished
    with suppress(FileExistsError):  # it may really have been killed while it wrote
        (folder / "journal.log.lock").symlink_to("journal.log")
    with (folder / "journal.log").open("a") as file:
        file.write('{"op_code": 4, "wor')

    done = search(tmp_path, *words, FAKE_SLEEP_S="0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Continuing, " in done.stdout
    assert states(folder) == ["COMPLETE"] * 8
    assert len({str(trial.params) for trial in study_of(folder).trials}) == 8
    runs = sorted(folder.glob("digits-lr-*"))
    assert len(runs) == 8
    for number in range(8):
        starts = starts_of(folder / f"digits-lr-{number}")
        assert len({overrides for _, overrides in starts}) == 1
        assert len(starts) <= (2 if number in unfinished else 1)
        epochs = [
            r.split(",")[0]
            for r in (folder / f"digits-lr-{number}/metrics.csv").read_text().splitlines()[1:]
        ]
        assert epochs == ["0", "1", "2", "3"]

    more = search(tmp_path, "n_trials=9", KEEP_ALL)
    assert more.returncode == 0
    assert states(folder) == ["COMPLETE"] * 9


def test_a_search_waits_for_the_trials_of_a_killed_one(tmp_path: Path):
    """A stand-in that finds another one at work ends with an error, and so would its trial."""
    folder, gate = tmp_path / "sweeps/digits-lr", tmp_path / "gate"
    words = ["n_trials=2", "trials_at_once=2", KEEP_ALL]
    with begin(tmp_path, *words, FAKE_GATE=str(gate)) as first:
        wait_until(lambda: len(list(folder.glob("digits-lr-*/metrics.csv"))) == 2)
        first.kill()
    with begin(tmp_path, *words, FAKE_GATE=str(gate)) as second:
        assert "2 trials" in second.stdout.readline()
        time.sleep(4 * POLL_S)  # it looks at the trials several times
        assert [len(starts_of(run_dir)) for run_dir in folder.glob("digits-lr-*")] == [1, 1]
        gate.touch()
        out, err = second.communicate(timeout=60)
    assert (second.returncode, err) == (0, ""), out
    assert states(folder) == ["COMPLETE"] * 2


def test_a_process_that_outlives_its_search_is_never_doubled(tmp_path: Path):
    process = TrialProcess("one-0", tmp_path, ["model.optimizer.lr=0.1"], script=TRIAL)
    os.environ["FAKE_SLEEP_S"] = "60"
    try:
        assert process.start()
    finally:
        del os.environ["FAKE_SLEEP_S"]
    wait_until((tmp_path / "one-0/starts.txt").exists)

    another = TrialProcess("one-0", tmp_path, ["model.optimizer.lr=0.1"], script=TRIAL)
    assert another.is_running()
    assert not another.start()
    another.send(signal.SIGTERM)  # it finds the process of the other
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 143
    assert not another.is_running()
    assert len(starts_of(tmp_path / "one-0")) == 1


def test_ctrl_c_stops_the_trials_and_says_how_to_go_on(tmp_path: Path):
    folder = tmp_path / "sweeps/mine"
    words = ["n_trials=3", "trials_at_once=2", KEEP_ALL]
    with begin(tmp_path, *words, FAKE_SLEEP_S="60", RUN_ID="mine") as first:
        wait_until(lambda: len(list(folder.glob("mine-*/starts.txt"))) == 2)
        second = search(tmp_path, *words, RUN_ID="mine")
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=60)
    assert second.returncode == 2
    assert re.match(r"error: \S+ is in use by process \d+ on ", second.stderr)
    assert (first.returncode, err) == (130, "")
    assert "0 of 3 trials are done. To continue:" in out
    assert "  RUN_ID=mine samestep sweep sweep=digits_lr" in out
    assert states(folder) == ["RUNNING", "RUNNING"]
    for run_dir in folder.glob("mine-*"):
        with (run_dir / "claim").open() as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody is there any more

    done = search(tmp_path, *words, RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    assert states(folder) == ["COMPLETE"] * 3


def test_trials_that_fail_are_recorded_and_passed_over_in_any_storage(tmp_path: Path):
    storage = f"sqlite:///{tmp_path}/optuna.db"
    words = ["n_trials=6", f"storage={storage}", KEEP_ALL]
    done = search(tmp_path, *words, FAKE_FAULT="crash")
    assert done.returncode == 0, done.stderr
    trials = optuna.load_study(study_name="digits-lr", storage=storage).trials
    assert [t.state.name for t in trials] == [
        "FAIL" if t.params["model.optimizer.lr"] > 0.01 else "COMPLETE" for t in trials
    ]
    reasons = {trial.user_attrs.get("reason") for trial in trials}
    assert reasons == {None, "exit code 1: the loss is infinite"}
    assert "fail: exit code 1: the loss is infinite" in done.stdout
    assert not list(tmp_path.rglob("journal.log"))


def test_trials_are_pruned_and_nan_ends_a_trial(tmp_path: Path):
    words = ["n_trials=6", "pruner={_target_: optuna.pruners.ThresholdPruner, lower: 0.9975}"]
    done = search(tmp_path, *words, FAKE_FAULT="nan", FAKE_SLEEP_S="0.3", FAKE_PLOTS="1")
    assert done.returncode == 0, done.stderr
    for trial in study_of(tmp_path / "sweeps/digits-lr").trials:
        lr, reason = trial.params["model.optimizer.lr"], trial.user_attrs.get("reason")
        if lr > 0.01:
            assert (trial.state.name, reason) == ("FAIL", "val/accuracy is nan in validation 1")
        elif lr > 0.0025:
            assert (trial.state.name, reason) == ("PRUNED", "after validation 1")
            assert len(trial.intermediate_values) < 4
        else:
            assert trial.state.name == "COMPLETE"
            assert trial.value == pytest.approx(1 - lr + 0.003)
    assert {*states(tmp_path / "sweeps/digits-lr")} == {"FAIL", "PRUNED", "COMPLETE"}
    page = (tmp_path / "sweeps/digits-lr/search.html").read_text()
    assert page.count("<svg") >= 3
    assert "src=" not in page.replace("xmlns", "")
    assert page.count("<tr>") == 7


def test_a_full_disk_is_one_message(tmp_path: Path):
    """The journal may have 1,024 bytes, and each trial writes more."""
    limit = "import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
    code = f"{limit}sys.argv[0] = {SWEEP!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_code(code, *WORDS, f"run_root={tmp_path}", "n_trials=2", timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "cannot be written: File too large; make room there" in done.stderr
