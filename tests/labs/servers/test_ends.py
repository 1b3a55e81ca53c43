"""When a run ends: what is counted, what is not, and what no controller may start again."""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from samestep.launch.follow import NOTE
from tests.conftest import ROOT
from tests.labs.servers.conftest import SAVES, Cluster, Object, until
from tests.labs.servers.test_runs import evict

pytestmark = pytest.mark.servers


FAILS_ONCE = """mkdir {folder}/$JOB_COMPLETION_INDEX && {{
  until [ -e {folder}/0 ] && [ -e {folder}/1 ]; do sleep 0.1; done; echo lost; exit 1; }}
"""


def test_an_incident_of_all_nodes_is_one_failure_of_each(cluster: Cluster) -> None:
    cluster.pods_do(FAILS_ONCE.format(folder=cluster.folder) + SAVES)
    assert cluster.launch("k8s", "mine", "cluster.backoff_limit=1").returncode == 0
    until(lambda: len(cluster.pods("mine", "Failed")) == 2)
    cluster.until_training("mine")  # each waits 10 seconds
    until(lambda: cluster.get("jobs", "mine")["status"].get("failed") == 2)
    assert not cluster.get("jobs", "mine")["status"].get("conditions")


def test_a_pod_that_fails_too_often_ends_the_run_at_once(cluster: Cluster) -> None:
    go = cluster.folder / "go"
    breaks = f"until [ -e {go} ]; do sleep 0.1; done; echo broken; exit 1"
    cluster.pods_do(f"[ $JOB_COMPLETION_INDEX = 0 ] || {{ {breaks}; }}; {SAVES}")
    assert cluster.launch("k8s", "mine", "cluster.backoff_limit=0").returncode == 0
    follower = cluster.follow("mine", started=1)
    go.touch()
    exit_code, log = follower.end()
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


def test_status_counts_pods_that_no_limit_counts_and_tells_of_slow_saves(cluster: Cluster) -> None:
    cluster.pods_do(f"echo {NOTE} 60 s to save; {SAVES}")
    assert cluster.launch("k8s", "mine").returncode == 0
    pods = cluster.until_training("mine")
    evict(cluster, pods[0]["metadata"]["name"])
    until(lambda: cluster.pods("mine", "Failed"))
    status = cluster.samestep("status", "mine").stdout
    assert "mine: pods were evicted, preempted or stopped 1 times, and replaced" in status
    assert f"mine: {NOTE} 60 s to save\n" in status


STARTS_IN_VAIN = """PYTHONPATH={root}/library/src {python} - << 'END' || exit 2
from pathlib import Path
from samestep.errors import ConfigError
from samestep.launch import starts
try:
    starts.reject_endless(Path("{folder}"), 1)
except ConfigError as error:
    raise SystemExit(f"error: {{error}}")
END
"""


def test_evictions_that_the_run_causes_itself_end_it(cluster: Cluster) -> None:
    """As from a disk that each start fills again: no Job counts them, the run counts its starts."""
    script = STARTS_IN_VAIN.format(root=ROOT, python=sys.executable, folder=cluster.folder)
    cluster.pods_do(script + SAVES)
    (cluster.folder / "run.json").write_text("{}")
    words = ("trainer.num_nodes=1", "cluster.backoff_limit=1")
    assert cluster.launch("k8s", "mine", *words).returncode == 0
    follower = cluster.follow("mine", started=1)
    evicted: list[str] = []
    for _ in range(2):
        (name,) = until(lambda: find_new_pods(cluster, evicted))
        # It has counted its start before it says so.
        follower.until_shown(f"started {name}")
        evict_for_a_full_disk(cluster, name)
        evicted.append(name)
        assert "it was evicted (The node was low on" in status_of(cluster)
    exit_code, log = follower.end()
    assert exit_code == 1
    assert "2 starts in a row have saved no new checkpoint" in log
    failed = cluster.get("jobs", "mine")["status"]["conditions"]
    assert "PodFailurePolicy" in [condition.get("reason") for condition in failed]


def find_new_pods(cluster: Cluster, evicted: list[str]) -> list[str]:
    """The names of the pods that run, but for those that were evicted a moment ago."""
    names = [pod["metadata"]["name"] for pod in cluster.pods("mine", "Running")]
    return [name for name in names if name not in evicted]


def evict_for_a_full_disk(cluster: Cluster, pod: str) -> None:
    """What kubelet does; the nodes of the tests have no disks."""
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    status = {"phase": "Failed", "reason": "Evicted", "conditions": [disrupted]}
    status["message"] = "The node was low on resource: ephemeral-storage."
    merge(cluster, f"{cluster.path_of('pods', pod)}/status", {"status": status})


@pytest.fixture
def lost_node(cluster: Cluster) -> Iterator[str]:
    """A node that nobody looks after: as after the loss of a machine, no pod on it ever ends."""
    name = f"lost-{cluster.namespace}"
    taint = {"key": name, "effect": "NoSchedule"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {name: "1"}}}
    assert cluster.call("POST", "/api/v1/nodes", node | {"spec": {"taints": [taint]}}).ok
    capacity = {"cpu": "4", "memory": "8Gi", "pods": "9"}
    status = {"capacity": capacity, "allocatable": capacity}
    merge(cluster, f"/api/v1/nodes/{name}/status", {"status": status | condition("True")})
    yield name
    assert cluster.call("DELETE", f"/api/v1/nodes/{name}").ok


def condition(status: str) -> Object:
    return {"conditions": [{"type": "Ready", "status": status, "lastHeartbeatTime": now()}]}


def test_a_lost_node_is_named_and_both_ways_out_lead_out(cluster: Cluster, lost_node: str) -> None:
    pod = start_and_lose(cluster, lost_node)
    # Its grace period is over after two seconds, and a minute later it is not slow but lost.
    said = until(
        lambda: "out-of-service=nodeshutdown" in (text := status_of(cluster)) and text, pause_s=3
    )
    assert f"mine: waits for {pod}, whose node does not answer" in said
    assert f"kubectl taint nodes {lost_node} " in said
    # For users: the Job itself never counts the pod as ended.
    assert cluster.call("DELETE", cluster.path_of("pods", pod), {"gracePeriodSeconds": 0}).ok
    assert cluster.samestep("cancel", "mine").returncode == 0
    until(lambda: not cluster.left())
    # For administrators.
    pod = start_and_lose(cluster, lost_node)
    path = f"/api/v1/nodes/{lost_node}"
    merge(cluster, f"{path}/status", {"status": condition("False")})
    out = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown"}
    merge(cluster, path, {"spec": {"taints": [out | {"effect": "NoExecute"}]}})
    until(lambda: pod not in [item["metadata"]["name"] for item in cluster.pods("mine", "Running")])
    until(lambda: cluster.pods("mine", "Pending"))


def start_and_lose(cluster: Cluster, node: str) -> str:
    """Launch a run on a node that is lost when its pod runs; the pod is evicted in vain."""
    words = (f"cluster.node_selector={{{node}: '1'}}", "cluster.grace_s=2")
    words += (f"cluster.tolerations=[{{key: {node}}}]", "cluster.shutdown_s=1")
    done = cluster.launch("k8s", "mine", *words, "trainer.num_nodes=1")
    assert done.returncode == 0, done.stderr
    (pod,) = until(lambda: [pod for pod in cluster.pods("mine") if "nodeName" in pod["spec"]])
    running = {"name": "trainer", "image": "x:1", "imageID": "x", "ready": True}
    running |= {"restartCount": 0, "started": True, "state": {"running": {}}}
    status = {"phase": "Running", "containerStatuses": [running]}
    name = str(pod["metadata"]["name"])
    place = cluster.path_of("pods", name)
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    merge(cluster, f"{place}/status", {"status": status | ready})
    evict(cluster, name)
    return name


def status_of(cluster: Cluster) -> str:
    return cluster.samestep("status", "mine").stdout


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(cluster: Cluster, path: str, body: Object) -> None:
    """Change the status of an object, as kubelet does."""
    answer = cluster.http.patch(
        cluster.url + path, json=body, headers={"Content-Type": "application/merge-patch+json"}
    )
    assert answer.ok, answer.text
