"""Runs in a queue of Kueue: they stop and save for a more urgent one, wait, and take their turn."""

import pytest

from tests.labs.servers.conftest import SAVES, STARTED_POD, Cluster, Object, until
from tests.samestep.launch.test_patch import RECIPES

pytestmark = pytest.mark.servers
KUEUE = "kueue.x-k8s.io/v1beta2"
TARGETS = ("k8s", "jobset", "kubeflow", "pytorchjob", "elastic")
IN_QUEUE = "cluster.queue=team"
TAKES_TURNS = """case $POD in
*etcd*) exec sleep 3600;;
urgent*) echo started $POD; until [ -e {folder}/trained ]; do sleep 0.1; done; exit 0;;
esac
""" + SAVES.replace("{", "{{").replace("}", "}}")


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
def test_a_run_waits_makes_room_and_takes_its_turn(queue: Cluster, target: str) -> None:
    """From the queue to its end, and back into the queue for a more urgent run."""
    queue.pods_do(TAKES_TURNS.format(folder=queue.folder))
    assert queue.launch(target, "first", IN_QUEUE).returncode == 0
    queue.until_training("first")
    follower = queue.follow("first", started=2)

    # There is no room for a second one, which can be cancelled before it has any pod.
    assert queue.launch(target, "second", IN_QUEUE).returncode == 0
    until(lambda: waits(queue, "second", "couldn't assign flavors"), pause_s=1)
    assert not find_training_pods(queue, "second")
    assert queue.samestep("cancel", "second").returncode == 0
    until(lambda: not [name for name in queue.left() if "second" in name])

    urgent = (IN_QUEUE, "cluster.queue_priority=urgent")
    assert queue.launch(target, "urgent", *urgent).returncode == 0
    queue.until_training("urgent")
    until(lambda: not find_training_pods(queue, "first", "Running"))
    until(lambda: waits(queue, "first"), pause_s=1)

    # It ends by itself, and the first one takes its place.
    (queue.folder / "trained").touch()
    exit_code, log = queue.follow("urgent").end()
    assert exit_code == 0, log
    queue.until_training("first")
    follower.until_shown(STARTED_POD, 4)
    assert not waits(queue, "first")
    assert queue.samestep("cancel", "first").returncode == 0
    _, log = follower.end()
    saved = [line for line in log.splitlines() if line.endswith("] saved")]
    assert len(saved) == 4, log  # both pods, when they made room and when they ended
    assert "waits in the queue" in log


def waits(cluster: Cluster, run_id: str, reason: str = "") -> bool:
    """Whether ``samestep status`` says that the run waits, and why."""
    lines = cluster.samestep("status", run_id).stdout.splitlines()
    return any("waits in the queue" in line and reason in line for line in lines)


def find_training_pods(cluster: Cluster, run_id: str, phase: str = "") -> list[Object]:
    """The pods of a run without its etcd, which is in no queue."""
    return [pod for pod in cluster.pods(run_id, phase) if "etcd" not in pod["metadata"]["name"]]


def test_an_elastic_run_starts_with_its_minimum(queue: Cluster) -> None:
    """The recipe of docs/clusters/recipes.md, where another run leaves room for one pod."""
    assert queue.launch("k8s", "other", IN_QUEUE, "trainer.num_nodes=1").returncode == 0
    until(lambda: queue.pods("other", "Running"))
    (recipe,) = [found for found in RECIPES if found["defaults"][0] == "elastic"]
    ((name, value),) = recipe["job_patch"]["metadata"]["annotations"].items()
    patch = f"cluster.job_patch={{metadata: {{annotations: {{{name}: '{value}'}}}}}}"
    overrides = (IN_QUEUE, f"cluster.min_nodes={recipe['min_nodes']}", patch)
    done = queue.launch("elastic", "mine", *overrides)
    assert done.returncode == 0, done.stderr
    until(lambda: len(find_training_pods(queue, "mine", "Running")) == 1)
    assert not waits(queue, "mine")
    # It stays the run that was launched, although Kueue has changed its Job.
    again = queue.launch("elastic", "mine", *overrides)
    assert "stays unchanged" in again.stdout, again.stderr
    assert queue.samestep("cancel", "mine").returncode == 0
