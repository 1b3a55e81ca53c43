"""A grid whose runs are Jobs: submitted once, left or followed, and continued by its command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from tests.conftest import ROOT, environment
from tests.labs.servers.conftest import Cluster, until

pytestmark = pytest.mark.servers
TRAINS = """
case $POD in
*-seed-0-*) ;;
*) trap 'echo saved; exit 143' TERM; until [ -e {folder}/go ]; do sleep 0.1; done;;
esac
echo trained in $POD
"""
"""The first run ends at once, the others when they may."""


def begin_grid(cluster: Cluster, *words: str) -> "subprocess.Popen[bytes]":
    """Type the command of a grid of small runs on the cluster."""
    with said_file(cluster).open("wb") as file:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "-m", *cluster.words("k8s"),
             "trainer.num_nodes=1", *words],
            cwd=cluster.folder, env=environment(KUBECONFIG=str(cluster.kubeconfig), RUN_ID="grid"),
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


def said_file(cluster: Cluster) -> Path:
    """Where the last command has printed."""
    return cluster.folder / "said.txt"


def end(cluster: Cluster, grid: "subprocess.Popen[bytes]") -> str:
    """Wait for the end of the command, and return what it has printed."""
    grid.wait(PATIENCE_S)
    return said_file(cluster).read_text()


def train_grid(cluster: Cluster, *words: str) -> str:
    """Type the command, and return what it prints; it succeeds."""
    with begin_grid(cluster, *words) as grid:
        said = end(cluster, grid)
    assert grid.returncode == 0, said
    return said


def uids(cluster: Cluster) -> dict[str, str]:
    """The Jobs of the grid, which have another uid if they were made again."""
    return {job["metadata"]["name"]: job["metadata"]["uid"] for job in cluster.get("jobs")}


def test_a_grid_is_submitted_once_and_continued(cluster: Cluster) -> None:
    cluster.pods_do(TRAINS.format(folder=cluster.folder))
    assert "grid-seed-1: submitted" in train_grid(cluster, "seed=0,1")
    until(lambda: cluster.pods("grid-seed-0", "Succeeded"))
    (pod,) = until(lambda: cluster.pods("grid-seed-1", "Running"))
    assert "seed=1" in pod["spec"]["containers"][0]["args"]
    before = uids(cluster)
    assert before.keys() == {"grid-seed-0", "grid-seed-1"}

    again = train_grid(cluster, "seed=0,1")
    assert "[grid-seed-0] grid-seed-0: is finished, nothing to do" in again
    assert "[grid-seed-1] grid-seed-1: was launched by" in again
    assert uids(cluster) == before
    (same,) = cluster.pods("grid-seed-1")
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]

    # One more run, and this time the command waits for all of them.
    (cluster.folder / "go").touch()
    followed = train_grid(cluster, "seed=0,1,2", "grid.wait=true")
    for seed in range(3):
        assert f"grid-seed-{seed}: finished" in followed
    assert "trained in grid-seed-2-0-" in followed
    after = uids(cluster)
    assert len(after) == 3
    assert before.items() <= after.items()

    # Their Jobs may be gone by then, as after cluster.ttl_s.
    for name in after:
        cluster.delete("jobs", name)
    done = train_grid(cluster, "seed=0,1,2", "grid.wait=true")
    assert done.startswith("Grid grid: 3 of 3 runs are finished\n")
    assert "grid-seed-" not in done
    until(lambda: not cluster.get("jobs"))


def test_a_grid_that_is_stopped_cancels_its_runs_which_save(cluster: Cluster) -> None:
    cluster.pods_do(TRAINS.format(folder=cluster.folder))
    words = ("seed=0,1", "grid.wait=true")
    with begin_grid(cluster, *words) as grid:
        # The grid learns some time after the cluster that a run has finished. One that it does not
        # know to have finished is cancelled like the others, and submitted again.
        until(lambda: "grid-seed-0: finished" in said_file(cluster).read_text())
        until(lambda: cluster.pods("grid-seed-1", "Running"))
        # Its pod may come before its launch is over, which would take it back.
        until(lambda: "samestep cancel grid-seed-1" in said_file(cluster).read_text())
        grid.send_signal(signal.SIGTERM)
        said = end(cluster, grid)
    assert grid.returncode == 143, said
    assert "grid-seed-1: cancelled; the same submit resumes it" in said
    assert "grid-seed-1" not in uids(cluster)
    (cluster.folder / "go").touch()
    again = train_grid(cluster, *words)
    assert "grid-seed-1: finished; 0 of 2 runs are left" in again
