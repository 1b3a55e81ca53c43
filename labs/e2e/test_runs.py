"""The tests: ``python -m labs.e2e --help`` says what they need."""

import json
import os
import re
import secrets
from collections.abc import Iterator

import pytest

from labs.e2e.cluster import INSTANCE, KINDS, WAIT, Cluster, until

pytestmark = pytest.mark.skipif(
    os.environ.get("E2E") != "1",
    reason="E2E=1 IMAGE=<name:tag> runs it on the cluster that kubectl reaches",
)
TARGETS = {  # the kind of object that each needs
    "k8s": "jobs", "jobset": "jobsets", "kubeflow": "trainjobs", "pytorchjob": "pytorchjobs",
}  # fmt: skip
LONG = [f"trainer.max_epochs={os.environ.get('E2E_EPOCHS', 1500)}"]
KILL = """
import os, pathlib
for process in pathlib.Path('/proc').glob('[0-9]*'):
    try:
        if b'LOCAL_RANK=0' in (process / 'environ').read_bytes():
            os.kill(int(process.name), 9)
    except OSError:
        pass
"""
HASH = """
import hashlib, sys, torch
weights = torch.load(sys.argv[1], weights_only=False)['state_dict']
found = hashlib.sha256()
for name in sorted(weights):
    found.update(name.encode() + weights[name].numpy().tobytes())
print('sha256', found.hexdigest())
"""


@pytest.fixture
def run_id(cluster: Cluster) -> Iterator[str]:
    """A new name. Afterwards the objects of the run are removed."""
    name = f"e2e-{secrets.token_hex(3)}"
    yield name
    remove(cluster, name)


def remove(cluster: Cluster, run_id: str) -> None:
    cluster.samestep_once(["cancel", run_id], {})  # it may not have been submitted
    cluster.kubectl("delete", KINDS, f"--selector={INSTANCE}={run_id}", *WAIT, timeout=330)


@pytest.fixture(params=TARGETS)
def target(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if not cluster.knows(TARGETS[name]):
        pytest.skip(f"the cluster does not know {TARGETS[name]}")
    return name


@pytest.fixture(scope="session")
def quiet_weights(cluster: Cluster) -> str:
    """The hash of the final weights of a run that nobody disturbs."""
    cluster.launch("k8s", "e2e-quiet", *LONG)
    cluster.samestep("logs", "e2e-quiet")
    found = hash_weights(cluster, "e2e-quiet")
    remove(cluster, "e2e-quiet")
    return found


def hash_weights(cluster: Cluster, run_id: str) -> str:
    path = f"/volume/runs/{run_id}/checkpoints/last.ckpt"
    output = cluster.execute("hash", "python", "-c", HASH, path)
    print(run_id, output)
    return output.split()[-1]


def last_epoch(cluster: Cluster, run_id: str) -> int:
    """The highest epoch that node 0 has printed; 0 before the first one."""
    lines = [line for found in cluster.lines(run_id, "epoch ").values() for line in found]
    return max((int(number) for number in re.findall(r"epoch (\d+)/", "\n".join(lines))), default=0)


def train_past(cluster: Cluster, run_id: str, epoch: int) -> None:
    until(f"{run_id} is past epoch {epoch}", lambda: last_epoch(cluster, run_id) > epoch)


def count_continued(cluster: Cluster, run_id: str) -> dict[str, int]:
    """How often each container of node 0 has printed that it continues."""
    return {key: len(lines) for key, lines in cluster.lines(run_id, "Continuing: ").items()}


def until_it_continues(cluster: Cluster, run_id: str, before: dict[str, int]) -> None:
    """Wait until node 0 has printed that it continues, in a new container or once more."""

    def continues() -> bool:
        now = count_continued(cluster, run_id)
        return any(number > before.get(key, 0) for key, number in now.items())

    until(f"{run_id} continues", continues)


def test_two_nodes_train_one_model(cluster: Cluster, run_id: str):
    words = ["trainer.max_epochs=3"]
    cluster.launch("k8s", run_id, *words, "--check")
    cluster.launch("k8s", run_id, *words)
    cluster.launch("k8s", run_id, *words)  # changes nothing
    followed = cluster.samestep("logs", run_id)  # exit code 0: the run has succeeded
    assert f"Finished: runs/{run_id}" in followed
    assert followed.count("entrypoint: ") >= 2  # each node prints its plan

    assert json.loads(cluster.read(run_id, "metrics.json"))["test/accuracy"] > 0.2  # of 10 digits
    (start,) = json.loads(cluster.read(run_id, "run.json"))["starts"]
    assert (start["world_size"], start["num_nodes"]) == (2, 2)
    assert f"Job {run_id}: Complete" in cluster.samestep("status", run_id)
    cluster.samestep("cancel", run_id)
    until("nothing is left", lambda: not cluster.left(run_id))


def test_whatever_is_lost_the_run_ends_with_the_same_weights(
    cluster: Cluster, target: str, run_id: str, quiet_weights: str
):
    """Both pods are deleted, a rank is killed, and the run is cancelled and launched again."""
    cluster.launch(target, run_id, *LONG)
    for index in (1, 0):
        train_past(cluster, run_id, last_epoch(cluster, run_id) + 1)
        before = count_continued(cluster, run_id)
        pod = cluster.running_pod(run_id, index)
        cluster.kubectl("delete", "pod", pod, "--wait=false")
        until_it_continues(cluster, run_id, before)
    train_past(cluster, run_id, last_epoch(cluster, run_id) + 1)
    before = count_continued(cluster, run_id)
    pod = cluster.running_pod(run_id, 1)
    cluster.kubectl("exec", pod, "--", "python", "-c", KILL)
    until_it_continues(cluster, run_id, before)
    assert f"{pod} " in cluster.samestep("status", run_id)

    train_past(cluster, run_id, epoch := last_epoch(cluster, run_id))
    cluster.samestep("cancel", run_id)
    until("nothing is left", lambda: not cluster.left(run_id))
    files = cluster.execute("look", "find", f"/volume/runs/{run_id}", "-type", "f").split()
    names = {name.removeprefix(f"/volume/runs/{run_id}/") for name in files}
    assert "checkpoints/last.ckpt" in names
    assert "metrics.json" not in names, f"{LONG} is too short to interfere"

    cluster.launch(target, run_id, *LONG)
    followed = cluster.samestep("logs", run_id)
    (first, *_) = re.findall(r"epoch (\d+)/", followed)
    assert int(first) >= epoch  # no epoch is trained twice
    assert f"Finished: runs/{run_id}" in followed
    assert len(json.loads(cluster.read(run_id, "run.json"))["starts"]) >= 5
    assert hash_weights(cluster, run_id) == quiet_weights


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[list[str]]:
    """A queue of Kueue with room for one run; the words with which a run waits there."""
    if not cluster.knows("clusterqueues"):
        pytest.skip("the cluster does not have Kueue")
    name = f"{cluster.namespace}-{secrets.token_hex(2)}"
    api = "kueue.x-k8s.io/v1beta2"
    quotas = [
        {"name": "cpu", "nominalQuota": "600m"},
        {"name": "memory", "nominalQuota": "4Gi"},
    ]
    flavors = [{"name": name, "resources": quotas}]
    documents = [
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": name}},
        {"apiVersion": api, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": flavors}],
        }},
        {"apiVersion": api, "kind": "LocalQueue", "metadata": {"name": name},
         "spec": {"clusterQueue": name}},
        {"apiVersion": api, "kind": "WorkloadPriorityClass", "metadata": {"name": name},
         "value": 1000},
    ]  # fmt: skip
    cluster.kubectl("create", "--filename=-", documents=documents)
    yield [f"cluster.queue={name}", f"cluster.queue_priority={name}"]
    cluster.kubectl("delete", "--filename=-", "--wait=false", documents=documents)


def test_a_run_makes_room_for_an_urgent_one_and_ends_with_the_same_weights(
    cluster: Cluster, target: str, queue: list[str], run_id: str, quiet_weights: str
):
    waits, urgent = f"{run_id}-waits", f"{run_id}-urgent"
    short = ["trainer.max_epochs=3"]
    try:
        cluster.launch(target, run_id, *LONG, *queue[:1])
        train_past(cluster, run_id, 1)
        cluster.launch(target, waits, *short, *queue[:1])
        said = f"{waits}: waits in the queue"
        until(said, lambda: said in cluster.samestep("status", waits))
        assert not cluster.pods(waits)
        cluster.samestep("cancel", waits)

        before = count_continued(cluster, run_id)
        cluster.launch(target, urgent, *short, *queue)
        assert f"Finished: runs/{urgent}" in cluster.samestep("logs", urgent)
        until_it_continues(cluster, run_id, before)
        cluster.samestep("logs", run_id)
        assert len(json.loads(cluster.read(run_id, "run.json"))["starts"]) >= 2
        assert hash_weights(cluster, run_id) == quiet_weights
    finally:
        for name in (waits, urgent):
            remove(cluster, name)
