"""``samestep sweep`` with real trials, killed in the middle."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from library.tests.kit import weights
from library.tests.programs import until
from samestep.run import record
from samestep.run.changes import read_config
from tests.conftest import NO_PICTURES, ROOT, environment, run
from tests.project.test_train import history
from tests.samestep.sweep.test_search import study_of

pytestmark = pytest.mark.program

SWEEP = (str(ROOT / "tests/samestep_here.py"), "sweep")
WORDS = [
    "sweep=digits_lr", "n_trials=2", "model=mlp", "trainer.max_epochs=2",
    "trainer.accelerator=cpu", "callbacks.checkpoints.every_s=1e-9", "report=false", NO_PICTURES,
    "trainer.limit_train_batches=10", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
]  # fmt: skip


def test_a_search_survives_a_kill(tmp_path: Path):
    # Its first trial must not end before the search is killed.
    enough, node = tmp_path / "enough", "+callbacks.slow"
    slow = [f"{node}._target_=labs.faults.saboteur.SlowUntil", f"{node}.path={enough}"]
    words = [*SWEEP, *WORDS, *slow, f"{node}.seconds=2", f"run_root={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    ) as first:
        claim = tmp_path / "digits-lr-0/.claim"
        until(lambda: claim.exists() and claim.read_text())
        until((tmp_path / "digits-lr-0/checkpoints/last.ckpt").exists)
        first.kill()
    enough.touch()

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

    # The last line trains the best one again, with the same bits.
    best = max(trials, key=lambda trial: trial.value)
    again = shlex.split(done.stdout.splitlines()[-1])
    again = run(*again[1:], RUN_ID="best")
    assert again.returncode == 0, again.stderr
    assert record.read(tmp_path / "best").best == best.value
    first, second = tmp_path / f"digits-lr-{best.number}", tmp_path / "best"
    assert history(first) == history(second)
    torch.testing.assert_close(weights(first, "best"), weights(second, "best"), rtol=0, atol=0)
