"""``samestep sweep`` with real trials, killed in the middle."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.run import record
from samestep.run.changes import read_config
from tests.conftest import NO_PICTURES, ROOT, environment, run
from tests.samestep.sweep.test_search import study_of, wait_until

SWEEP = (str(ROOT / "tests/samestep_here.py"), "sweep")
WORDS = [
    "sweep=digits_lr", "n_trials=2", "model=mlp", "trainer.max_epochs=2",
    "trainer.accelerator=cpu", "callbacks.checkpoints.every_s=1e-9", "report=false", NO_PICTURES,
    "trainer.limit_train_batches=10", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
]  # fmt: skip


def test_a_search_survives_a_kill(tmp_path: Path):
    words = [*SWEEP, *WORDS, f"run_root={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    ) as first:
        wait_until((tmp_path / "digits-lr-0/checkpoints/last.ckpt").exists, timeout_s=120)
        first.kill()

    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = study_of(tmp_path / "sweeps/digits-lr").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 2
    for trial in trials:
        run_dir = tmp_path / f"digits-lr-{trial.number}"
        status = record.read(run_dir)
        assert (status.state, status.epoch, status.best) == ("finished", 2, trial.value)
        lr = read_config(run_dir)["model"]["optimizer"]["lr"]
        assert lr == pytest.approx(trial.params["model.optimizer.lr"], rel=1e-4)
        assert f"model.optimizer.lr={lr} " in done.stdout
    listed = run("-m", "samestep", "runs", str(tmp_path)).stdout
    assert "digits-lr-0  finished" in listed
    assert "digits-lr-1  finished" in listed
    assert "sweeps" not in listed

    # The last line trains the best one again.
    best = max(trials, key=lambda trial: trial.value)
    again = shlex.split(done.stdout.splitlines()[-1])
    again = run(*again[1:], RUN_ID="best")
    assert again.returncode == 0, again.stderr
    assert record.read(tmp_path / "best").best == best.value
