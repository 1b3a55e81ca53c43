"""Runs on the cluster that kubectl reaches, submitted as a user does. Six minutes on two cores.

E2E=1 IMAGE=project:e2e python -m pytest --confcutdir=tests/e2e tests/e2e

It needs Kubernetes 1.29 or later, a node with 1 free CPU and 3 GiB of free memory, and the image
there (kind load docker-image project:e2e). It makes and removes a restricted namespace and a volume
in a folder of a node, which takes the right to make namespaces and PersistentVolumes. Without it,
name an existing namespace, and a claim there that two pods may share and user 1000 may write to.

IMAGE              name and tag, or digest, of the image
IMAGE_PULL_POLICY  Never; IfNotPresent if the image comes from a registry
NAMESPACE, VOLUME  an existing namespace and an existing claim; otherwise the test makes them
E2E_SECONDS        seconds that each wait may take, 900

A killed test may leave namespaces and volumes called project-e2e-... behind. No torch is needed.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import INSTANCE, KINDS, SECONDS, WAIT, Cluster, until

pytestmark = pytest.mark.skipif(
    os.environ.get("E2E") != "1",
    reason="E2E=1 IMAGE=<name:tag> runs it on the cluster that kubectl reaches",
)
LONG = ["trainer.max_epochs=1500"]  # 30,000 steps: minutes, in which a test can interfere


@pytest.fixture
def run_id(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new name. Afterwards the objects of the run are removed."""
    name = f"e2e-{secrets.token_hex(3)}"
    yield name
    cluster.kubectl("delete", KINDS, f"--selector={INSTANCE}={name}", *WAIT, timeout=330)


def last_epoch(cluster: Cluster, run_id: str) -> int:
    """The highest epoch that node 0 has printed; 0 before the first one."""
    lines = [line for found in cluster.lines(run_id, "epoch ").values() for line in found]
    return max((int(number) for number in re.findall(r"epoch (\d+)/", "\n".join(lines))), default=0)


def train_past(cluster: Cluster, run_id: str, epoch: int) -> None:
    until(f"{run_id} is past epoch {epoch}", lambda: last_epoch(cluster, run_id) > epoch)


def continues(cluster: Cluster, run_id: str, before: dict[str, list[str]]) -> bool:
    """Whether node 0 has printed that it continues, in a new pod or again in one of ``before``."""
    now = cluster.lines(run_id, "Continuing: ")
    return any(len(lines) > len(before.get(uid, [])) for uid, lines in now.items())


def complete(cluster: Cluster, run_id: str) -> bool:
    """Whether the Job is complete; it must not have failed."""
    job = cluster.job(run_id)
    assert job, f"the Job of {run_id} does not exist"
    conditions = {
        c["type"]: c for c in job["status"].get("conditions", []) if c["status"] == "True"
    }
    assert "Failed" not in conditions, conditions["Failed"]
    return "Complete" in conditions


def test_two_nodes_train_one_model(cluster: Cluster, run_id: str):
    words = ["trainer.max_epochs=3"]
    cluster.launch("check", run_id, *words)
    cluster.launch("submit", run_id, *words)
    cluster.launch("submit", run_id, *words)  # changes nothing
    followed = cluster.launch("logs", run_id, *words)
    assert f"Finished: runs/{run_id}" in followed
    assert followed.count("entrypoint: ") >= 2  # each node prints its plan
    until("the Job is complete", lambda: complete(cluster, run_id))

    assert json.loads(cluster.read(run_id, "metrics.json"))["test/accuracy"] > 0.2  # of 10 digits
    (start,) = json.loads(cluster.read(run_id, "run.json"))["starts"]
    assert (start["world_size"], start["num_nodes"]) == (2, 2)
    assert run_id in cluster.launch("status", run_id, *words)
    cluster.launch("cancel", run_id, *words)
    until("nothing is left", lambda: not cluster.left(run_id))


def test_a_run_survives_the_loss_of_any_pod(cluster: Cluster, run_id: str):
    cluster.launch("submit", run_id, *LONG)
    for index in (1, 0):
        train_past(cluster, run_id, last_epoch(cluster, run_id) + 1)
        delete_pod(cluster, run_id, index)
    assert run_id in cluster.launch("status", run_id, *LONG)
    until("the Job is complete", lambda: complete(cluster, run_id), seconds=2 * SECONDS)

    assert json.loads(cluster.read(run_id, "metrics.json"))["test/accuracy"] > 0.9
    assert len(json.loads(cluster.read(run_id, "run.json"))["starts"]) >= 3


def delete_pod(cluster: Cluster, run_id: str, index: int) -> None:
    """Delete the pod of a node, as an eviction does, and wait until the run continues."""
    assert not complete(cluster, run_id), f"{LONG} was too short to interfere"
    before = cluster.lines(run_id, "Continuing: ")
    for name in cluster.pods(run_id, index).values():
        cluster.kubectl("delete", "pod", name, "--wait=false")
    until(f"goes on without pod {index}", lambda: continues(cluster, run_id, before))


def test_a_cancelled_run_has_saved_and_continues(cluster: Cluster, run_id: str):
    cluster.launch("submit", run_id, *LONG)
    train_past(cluster, run_id, 1)
    printed = last_epoch(cluster, run_id)
    cluster.launch("cancel", run_id, *LONG)
    until("nothing is left", lambda: not cluster.left(run_id))
    files = cluster.execute("look", "find", f"/volume/runs/{run_id}", "-type", "f").split()
    names = {name.removeprefix(f"/volume/runs/{run_id}/") for name in files}
    assert "checkpoints/last.ckpt" in names
    assert "metrics.json" not in names

    cluster.launch("submit", run_id, *LONG)
    until("the run continues", lambda: continues(cluster, run_id, before={}))
    until("it prints an epoch", lambda: last_epoch(cluster, run_id))
    (lines,) = [found for found in cluster.lines(run_id, "epoch ").values() if found]
    first = re.search(r"epoch (\d+)/", lines[0])
    assert first
    assert int(first[1]) >= printed  # no epoch is trained twice
    cluster.launch("cancel", run_id, *LONG)
