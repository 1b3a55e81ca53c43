"""Runs of every target on real servers: they come, end, fail, are evicted and go."""

from pathlib import Path

import pytest

from tests.labs.servers.conftest import SAVES, Cluster, Object, until

pytestmark = pytest.mark.servers
TARGETS = ("k8s", "jobset", "kubeflow", "pytorchjob", "elastic")


STOPS_ONCE = """case $POD in *etcd*) exec sleep 3600;; esac
mkdir {folder}/stopped 2>/dev/null && {{ until [ -e {folder}/go ]; do sleep 0.1; done; exit 143; }}
"""


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_comes_again_is_cancelled_finishes_and_goes(cluster: Cluster, target: str) -> None:
    """From submit to the end of its objects, with all that may happen to its pods between."""
    # Exit code 143, as after SIGTERM of its node, is counted nowhere and ends nothing.
    cluster.pods_do(STOPS_ONCE.format(folder=cluster.folder) + SAVES)
    done = cluster.launch(target, "mine")
    assert done.returncode == 0, done.stderr
    assert "samestep logs mine" in done.stdout
    before = containers(cluster.until_training("mine"))
    (cluster.folder / "go").touch()
    # JobSet's controller, also of a TrainJob, makes both pods anew; it is not disturbed meanwhile.
    anew = 2 if target in ("jobset", "kubeflow") else 1
    until(lambda: len(containers(cluster.until_training("mine")) - before) == anew)
    pods = cluster.until_training("mine")
    conditions = cluster.get(*address(target))["status"].get("conditions", ())
    true = {condition["type"] for condition in conditions if condition["status"] == "True"}
    assert not true & {"Failed", "FailureTarget", "Completed", "Complete"}

    evict(cluster, pods[0]["metadata"]["name"])
    until(lambda: len(containers(cluster.until_training("mine")) - containers(pods)) == anew)
    if target == "jobset":
        status = cluster.get(*address(target))["status"]
        assert (status["restarts"], status.get("restartsCountTowardsMax", 0)) == (2, 0)

    pods = cluster.until_training("mine")
    objects = {pod["metadata"]["uid"] for pod in pods}
    follower = cluster.follow("mine", started=2)
    again = cluster.launch(target, "mine")
    assert again.returncode == 0, again.stderr
    assert {pod["metadata"]["uid"] for pod in cluster.pods("mine")} >= objects
    changed = cluster.launch(target, "mine", "seed=5")
    assert changed.returncode == 1
    assert "is running with other overrides" in changed.stderr
    assert "seed=5" not in (cluster.folder / "runs/mine/launch.yaml").read_text()

    status = cluster.samestep("status", "mine")
    assert status.returncode == 0, status.stderr
    for pod in pods:
        name = pod["metadata"]["name"]
        assert f"started {name}" in status.stdout  # the last line of its log

    cancelled = cluster.samestep("cancel", "mine")
    assert cancelled.returncode == 0, cancelled.stderr
    assert "cancelled; the same submit resumes it" in cancelled.stdout
    exit_code, log = follower.end()
    saved = [line for line in log.splitlines() if line.endswith("] saved")]
    assert len(saved) == 2, log
    assert "was removed before it ended" in log
    assert exit_code == 1
    until(lambda: not cluster.left())
    again = cluster.samestep("cancel", "mine")
    assert (again.returncode, again.stdout) == (1, "")
    assert "there is no such run" in again.stderr

    cluster.pods_do("case $POD in *etcd*) exec sleep 3600;; esac; echo trained in $POD")
    assert cluster.launch(target, "mine").returncode == 0
    exit_code, log = cluster.follow("mine").end()
    assert exit_code == 0, log
    assert log.count("trained in") == 2
    again = cluster.launch(target, "mine")
    assert "is finished, nothing to do" in again.stdout, again.stderr
    changed = cluster.launch(target, "mine", "seed=5")
    assert "finished before, and starts again" in changed.stdout, changed.stderr
    cluster.delete(*address(target))  # as after its cluster.ttl_s
    until(lambda: not cluster.left())


def evict(cluster: Cluster, pod: str) -> None:
    """What the drain of a node does."""
    meta = {"name": pod, "namespace": cluster.namespace}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
    assert cluster.call("POST", f"{cluster.path_of('pods', pod)}/eviction", eviction).ok


def containers(pods: list[Object]) -> set[tuple[str, int]]:
    """The pods, and how often each has been started again in its place."""
    return {
        (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in pods
    }


def address(target: str) -> tuple[str, str]:
    kinds = {"jobset": "jobsets", "kubeflow": "trainjobs", "pytorchjob": "pytorchjobs"}
    return kinds.get(target, "jobs"), "mine"


@pytest.mark.parametrize("target", ["k8s", "jobset", "kubeflow"])
def test_an_invalid_configuration_fails_the_run_at_once(cluster: Cluster, target: str) -> None:
    go = cluster.folder / "go"
    refuse = f"until [ -e {go} ]; do sleep 0.1; done; echo 'error: seed=x: no'; exit 2"
    cluster.pods_do(f"[ $JOB_COMPLETION_INDEX = 0 ] || {{ {refuse}; }}; {SAVES}")
    assert cluster.launch(target, "mine").returncode == 0
    follower = cluster.follow("mine", started=1)
    go.touch()
    exit_code, log = follower.end()
    assert exit_code == 1
    assert "error: seed=x: no" in log
    assert "] saved" in log  # the other pod had time for it
    again = cluster.launch(target, "mine")
    assert "failed before, and starts again" in again.stdout, again.stderr


def test_an_elastic_run_that_failed_starts_again_with_an_empty_etcd(cluster: Cluster) -> None:
    """A failed run has closed its rendezvous in etcd, so nobody could join it again."""
    cluster.pods_do("case $POD in *etcd*) echo of etcd; exec sleep 3600;; esac; exit 2")
    assert cluster.launch("elastic", "mine").returncode == 0
    until(lambda: "Failed" in str(cluster.get("jobs", "mine")["status"].get("conditions")))
    logs = cluster.samestep("logs", "mine")
    assert logs.returncode == 1
    assert "of etcd" not in logs.stdout  # it would be waited for, and does not end
    before = until(lambda: etcds_of(cluster))
    cluster.pods_do(SAVES)
    again = cluster.launch("elastic", "mine")
    assert "failed before, and starts again" in again.stdout, again.stderr
    cluster.until_training("mine")
    until(lambda: (now := etcds_of(cluster)) and not now & before)


def etcds_of(cluster: Cluster) -> set[str]:
    """The ids of the pods of etcd that are running."""
    pods = [pod["metadata"] for pod in cluster.pods("mine", "Running")]
    return {pod["uid"] for pod in pods if "etcd" in pod["name"]}


def test_a_run_is_found_on_other_machines(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.launch("jobset", "mine").returncode == 0
    elsewhere = Cluster(cluster.kubeconfig, cluster.namespace, tmp_path / "elsewhere")
    elsewhere.folder.mkdir()
    unknown = elsewhere.samestep("status", "mine")
    assert unknown.returncode == 2
    assert "add its cluster" in unknown.stderr
    words = ("cluster=jobset", f"cluster.namespace={cluster.namespace}")
    assert "JobSet mine: " in elsewhere.samestep("status", "mine", *words).stdout
    assert "cancelled" in elsewhere.samestep("cancel", "mine", *words).stdout


def test_what_is_not_there_is_said(cluster: Cluster) -> None:
    place = ("cluster=k8s", f"cluster.namespace={cluster.namespace}")
    for command in ("status", "logs", "cancel"):
        done = cluster.samestep(command, "mine", *place)
        assert (done.returncode, done.stdout) == (1, "")
        assert "there is no such run" in done.stderr
        nowhere = cluster.samestep(command, "mine", "cluster=k8s", "cluster.namespace=nowhere")
        assert nowhere.returncode == 1
        assert "there is no namespace nowhere" in nowhere.stderr


def test_a_run_starts_where_its_user_may_only_create(cluster: Cluster) -> None:
    """The cluster removes its other objects with it, although the user may change none."""
    rules = [
        {"apiGroups": ["", "batch", "networking.k8s.io"], "verbs": ["get", "list", "create"],
         "resources": ["jobs", "services", "networkpolicies", "persistentvolumeclaims"]},
    ]  # fmt: skip
    cluster.allow_guest(*rules)
    words = cluster.words("k8s")
    there = {"RUN_ID": "mine", "KUBECONFIG": cluster.kubeconfig_of("guest")}
    checked = cluster.samestep("launch", "--check", *words, **there)
    assert checked.returncode == 0, checked.stderr  # only controllers may create pods here
    submitted = cluster.samestep("launch", *words, **there)
    assert submitted.returncode == 0, submitted.stderr
    cluster.until_training("mine")
    cluster.delete("jobs", "mine")
    until(lambda: not cluster.left())
