"""Runs in a queue of Kueue: they stop and save for a more urgent one, wait, and take their turn."""

import pytest

from tests.labs.servers.conftest import STARTED_POD, Cluster, until

pytestmark = [pytest.mark.clusters, pytest.mark.servers]
KUEUE = "kueue.x-k8s.io/v1beta2"
TARGETS = ("k8s", "pytorchjob")
"""A PyTorchJob is suspended by another field than the others; kubeflow: test_sdk.py."""


@pytest.fixture
def queue(cluster: Cluster) -> Cluster:
    """A namespace with the queue ``team``, which has room for one run of two pods."""
    if not cluster.call("GET", cluster.path_of("clusterqueues")).ok:
        pytest.skip("Kueue is not started: it needs the right to write below /etc/kueue")
    name = cluster.namespace
    quotas = [
        {"name": "cpu", "nominalQuota": "200m"},
        {"name": "memory", "nominalQuota": "1Gi"},
    ]
    flavors = [{"name": name, "resources": quotas}]
    cluster.apply(
        {"apiVersion": KUEUE, "kind": "ResourceFlavor", "metadata": {"name": name}},
        {"apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": {"name": name}, "spec": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": flavors}],
        }},
        {"apiVersion": KUEUE, "kind": "LocalQueue", "metadata": {"name": "team"},
         "spec": {"clusterQueue": name}},
        {"apiVersion": KUEUE, "kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"},
         "value": 1000},
    )  # fmt: skip
    return cluster


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_saves_and_waits_while_a_more_urgent_one_runs(queue: Cluster, target: str) -> None:
    assert queue.launch(target, "first", "cluster.queue=team").returncode == 0
    queue.until_training("first")
    follower = queue.follow("first", started=2)
    urgent = ("cluster.queue=team", "cluster.queue_priority=urgent")
    assert queue.launch(target, "second", *urgent).returncode == 0
    queue.until_training("second")
    until(lambda: not queue.pods("first", "Running"))
    until(lambda: "waits in the queue" in queue.samestep("status", "first").stdout, pause_s=1)
    assert queue.samestep("cancel", "second").returncode == 0
    queue.until_training("first")
    follower.until_shown(STARTED_POD, 4)
    assert queue.samestep("cancel", "first").returncode == 0
    _, log = follower.end()
    saved = [line for line in log.splitlines() if line.endswith("] saved")]
    assert len(saved) == 4, log  # both pods, when they made room and when they ended
    assert "waits in the queue" in log
