"""When a run ends: what is counted, what is not, and what no controller may start again."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.labs.servers.conftest import SAVES, Cluster, Object, until
from tests.labs.servers.test_runs import evict

pytestmark = [pytest.mark.clusters, pytest.mark.servers]


FAILS_ONCE = """mkdir {folder}/$JOB_COMPLETION_INDEX && {{
  until [ -e {folder}/0 ] && [ -e {folder}/1 ]; do sleep 0.1; done; echo lost; exit 1; }}
"""


def test_an_incident_of_all_nodes_is_one_failure_of_each(cluster: Cluster) -> None:
    cluster.pods_do(FAILS_ONCE.format(folder=cluster.folder) + SAVES)
    assert cluster.launch("k8s", "mine", "cluster.backoff_limit=1").returncode == 0
    until(lambda: len(cluster.pods("mine", "Failed")) == 2)
    cluster.until_training("mine")  # each waits 10 seconds
    job = cluster.get("jobs", "mine")
    assert job["status"]["failed"] == 2
    assert not job["status"].get("conditions")


def test_a_pod_that_fails_too_often_ends_the_run_at_once(cluster: Cluster) -> None:
    cluster.pods_do(f"[ $JOB_COMPLETION_INDEX = 0 ] || {{ echo broken; exit 1; }}; {SAVES}")
    assert cluster.launch("k8s", "mine", "cluster.backoff_limit=0").returncode == 0
    exit_code, log = cluster.follow("mine").end()
    assert exit_code == 1
    assert "] saved" in log  # the other pod had time for it
    assert "mine: Failed (" in log


def test_an_elastic_run_counts_the_failures_of_each_of_its_pods(cluster: Cluster) -> None:
    assert cluster.launch("elastic", "mine", "cluster.backoff_limit=3").returncode == 0
    assert cluster.get("jobs", "mine")["spec"]["backoffLimit"] == 3 * 2


def test_a_trainjob_that_failed_stays_as_it_is(cluster: Cluster) -> None:
    """A TTL of its JobSet would have Trainer make that anew, and the run would train again."""
    rejected = cluster.launch("kubeflow", "mine", "cluster.ttl_s=1")
    assert rejected.returncode == 2
    assert "cluster.ttl_s=1: stays null with cluster=kubeflow" in rejected.stderr
    cluster.pods_do("echo error: seed=x: no; exit 2")
    assert cluster.launch("kubeflow", "mine").returncode == 0
    until(lambda: "Failed" in str(cluster.get("trainjobs", "mine").get("status")))
    assert "ttlSecondsAfterFinished" not in cluster.get("jobsets", "mine")["spec"]
    assert cluster.samestep("cancel", "mine").returncode == 0
    until(lambda: not cluster.left())


def test_status_counts_pods_that_no_limit_counts(cluster: Cluster) -> None:
    assert cluster.launch("k8s", "mine").returncode == 0
    pods = cluster.until_training("mine")
    evict(cluster, pods[0]["metadata"]["name"])
    until(lambda: cluster.pods("mine", "Failed"))
    status = cluster.samestep("status", "mine").stdout
    assert "mine: pods were evicted, preempted or stopped 1 times, and replaced" in status


def test_a_lost_node_is_named_with_the_way_out(cluster: Cluster) -> None:
    """Nobody looks after this node: as after the loss of a machine, no pod on it ever ends."""
    name = f"lost-{cluster.namespace}"
    path = f"/api/v1/nodes/{name}"
    taint = {"key": name, "effect": "NoSchedule"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {name: "1"}}}
    assert cluster.call("POST", "/api/v1/nodes", node | {"spec": {"taints": [taint]}}).ok
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now_and(hours=2)}
    capacity = {"cpu": "4", "memory": "8Gi", "pods": "9"}
    status = {"conditions": [ready], "capacity": capacity, "allocatable": capacity}
    merge(cluster, f"{path}/status", {"status": status})
    try:
        words = (f"cluster.node_selector={{{name}: '1'}}", "cluster.grace_s=2")
        words += (f"cluster.tolerations=[{{key: {name}}}]", "cluster.shutdown_s=1")
        assert cluster.launch("k8s", "mine", *words, "trainer.num_nodes=1").returncode == 0
        (pod,) = until(lambda: [pod for pod in cluster.pods("mine") if "nodeName" in pod["spec"]])
        running = {"name": "trainer", "image": "x:1", "imageID": "x", "ready": True}
        running |= {"restartCount": 0, "started": True, "state": {"running": {}}}
        place = cluster.path_of("pods", pod["metadata"]["name"])
        merge(cluster, f"{place}/status", {
            "status": {"phase": "Running", "containerStatuses": [running], "conditions": [
                {"type": "Ready", "status": "True"}]}
        })  # fmt: skip
        evict(cluster, pod["metadata"]["name"])
        # Its grace period is over after two seconds, and a minute later it is not slow but lost.
        said = until(
            lambda: "out-of-service=nodeshutdown" in (text := status_of(cluster)) and text,
            pause_s=3,
        )
        assert f"mine: waits for {pod['metadata']['name']}, whose node does not answer" in said
        assert f"kubectl taint nodes {name} " in said
        assert cluster.call("DELETE", place, {"gracePeriodSeconds": 0}).ok  # delete --force
        until(lambda: cluster.pods("mine", "Pending"))
    finally:
        assert cluster.call("DELETE", path).ok


def status_of(cluster: Cluster) -> str:
    return cluster.samestep("status", "mine").stdout


def now_and(**more: int) -> str:
    return (datetime.now(UTC) + timedelta(**more)).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(cluster: Cluster, path: str, body: Object) -> None:
    """Change the status of an object, as kubelet does."""
    answer = cluster.http.patch(
        cluster.url + path, json=body, headers={"Content-Type": "application/merge-patch+json"}
    )
    assert answer.ok, answer.text
