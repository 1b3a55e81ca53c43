"""A search whose trials are Jobs of Kubernetes: the real kubectl, and a stand-in server."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.apiserver import Server, serve
from tests.conftest import ROOT, environment
from tests.samestep.sweep.test_search import states, study_of

pytestmark = [
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed"),
    pytest.mark.clusters,
]
COMPLETE = {"type": "Complete", "status": "True"}
FAILED = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}


class Pods(threading.Thread):
    """Plays the pods: each Job leaves its metrics in the store, and ends.

    The first trial is a success, the second has failed, and the third is bad from the start.
    """

    def __init__(self, server: Server, store: Path) -> None:
        super().__init__(daemon=True)
        self.server, self.store = server, store
        self.seen: dict[str, int] = {}
        self.at_once = 0
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            jobs = {job["metadata"]["name"]: job for job in self.server.of_kind("Job")}
            active = [job for job in jobs.values() if "status" not in job]
            self.at_once = max(self.at_once, len(active))
            for name, job in jobs.items():
                self.seen[name] = self.seen.get(name, 0) + 1
                if self.seen[name] == 20:  # a second, so that two are there at the same time
                    self.play(name, job)
            time.sleep(0.05)

    def play(self, name: str, job: dict) -> None:
        number = int(name.rpartition("-")[2])
        values = [0.1] if number == 2 else [0.8, 0.9]
        (self.store / name).mkdir(parents=True)
        text = "".join(f"{i},{i},{value}\n" for i, value in enumerate(values))
        (self.store / name / "metrics.csv").write_text("epoch,step,val/accuracy\n" + text)
        if number < 2:
            self.server.put(job | {"status": {"conditions": [FAILED if number else COMPLETE]}})


def test_each_trial_is_a_job_that_is_cancelled_when_it_is_pruned(tmp_path: Path):
    store = tmp_path / "store"
    words = [
        str(ROOT / "tests/samestep_here.py"), "sweep", "sweep=digits_lr",
        "n_trials=3", "trials_at_once=2",
        "cluster=k8s", "cluster.image=ghcr.io/me/project:1.2.3",
        f"callbacks.artifacts.url=file://{store}",
        "pruner={_target_: optuna.pruners.ThresholdPruner, lower: 0.5}",
    ]  # fmt: skip
    with serve() as server:
        pods = Pods(server, store)
        pods.start()
        variables = {"KUBECONFIG": server.kubeconfig(tmp_path), "KUBECACHEDIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment(**variables),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        pods.is_over = True
        pods.join()
        left = {job["metadata"]["name"] for job in server.of_kind("Job")}
    folder = tmp_path / "runs/sweeps/digits-lr"
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(folder) == ["COMPLETE", "FAIL", "PRUNED"]
    trials = study_of(folder).trials
    assert trials[0].value == 0.9
    assert "BackoffLimitExceeded" in trials[1].user_attrs["reason"]
    assert left == {"digits-lr-0", "digits-lr-1"}  # the pruned one was cancelled
    assert pods.at_once == 2
    # `samestep logs digits-lr-1` finds the trial.
    assert (tmp_path / "runs/digits-lr-1/launch.yaml").is_file()
    assert done.stdout.splitlines()[-1].startswith("  samestep launch trainer.max_epochs")


def test_the_manifests_are_checked_before_the_first_trial(tmp_path: Path):
    words = ["sweep=digits_lr", "cluster=k8s", "callbacks.artifacts.url=s3://bucket/runs"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/samestep_here.py"), "sweep", *words],
        cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cluster.image=registry.example.com/project:0.1.0" in done.stderr
    assert not list(tmp_path.iterdir())
