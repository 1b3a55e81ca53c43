"""A search whose trials are Jobs: they end, fail, and one is cancelled because it is bad."""

import subprocess
import sys

import pytest

from library.tests.programs import PATIENCE_S
from tests.conftest import ROOT, environment
from tests.labs.servers.conftest import Cluster
from tests.samestep.sweep.test_search import states, study_of

pytest.importorskip("optuna", reason="pip install project[sweep]")
pytestmark = pytest.mark.servers


TRIAL = """
cd {folder}
number=${{POD#digits-lr-}} number=${{number%%-*}}
mkdir -p at-work began store/digits-lr-$number
write() {{
  printf 'epoch,step,val/accuracy\\n'"$1" > store/digits-lr-$number/metrics.csv
}}
touch at-work/$number began/$number
ls at-work >> seen-by-$number
case $number in
0) until [ -e began/1 ]; do sleep 0.1; done; write '0,0,0.8\\n1,1,0.9\\n';;
1) until [ -e began/0 ]; do sleep 0.1; done; echo error: no space left; rm at-work/1; exit 2;;
2) write '0,0,0.1\\n'
   trap 'echo saved > saved; exit 143' TERM
   while :; do sleep 0.1; done;;
esac
rm at-work/$number
"""
"""The first is a success, when it has met the second, which fails; the third is bad."""


def test_each_trial_is_a_job_that_is_cancelled_when_it_is_pruned(cluster: Cluster) -> None:
    cluster.pods_do(TRIAL.format(folder=cluster.folder))
    words = [*cluster.words("k8s"), "trainer.num_nodes=1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/samestep_here.py"), "sweep", "sweep=digits_lr",
         "n_trials=3", "trials_at_once=2", *words,
         f"callbacks.artifacts.url=file://{cluster.folder}/store",
         "pruner={_target_: optuna.pruners.ThresholdPruner, lower: 0.5}"],
        cwd=cluster.folder, env=environment(KUBECONFIG=str(cluster.kubeconfig)),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    folder = cluster.folder / "runs/sweeps/digits-lr"
    assert done.returncode == 0, done.stdout + done.stderr
    assert states(folder) == ["COMPLETE", "FAIL", "PRUNED"]
    trials = study_of(folder).trials
    assert trials[0].value == 0.9
    assert trials[1].user_attrs["reason"] == "exit code 1: no space left"
    left = {job["metadata"]["name"] for job in cluster.get("jobs")}
    assert left == {"digits-lr-0", "digits-lr-1"}  # the pruned one was cancelled
    assert (cluster.folder / "saved").exists()
    assert len((cluster.folder / "seen-by-2").read_text().split()) <= 2
    # `samestep logs digits-lr-1` finds the trial.
    assert "no space left" in cluster.samestep("logs", "digits-lr-1").stdout
    assert done.stdout.splitlines()[-1].startswith("  samestep launch trainer.max_epochs")
