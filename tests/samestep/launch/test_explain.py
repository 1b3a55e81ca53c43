"""What people meet most, in one sentence: errors of kubectl, and pods that wait or fail.

What a real server can be made to say is asked of one: tests/labs/servers/test_explained.py.
"""

from datetime import UTC, datetime, timedelta

import pytest
from omegaconf import OmegaConf

from samestep.launch import follow
from samestep.launch.explain import explain_error, explain_pod
from samestep.plugins import save_time

FAILED = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("The connection to the server localhost:8080 was refused", "knows no cluster"),
        ("The connection to the server 10.0.0.1:6443 was refused - did", "does not answer"),
        ('error: context "x" does not exist', "kubectl has no context x"),
        ("error: context was not found for specified context: x", "kubectl has no context x"),
        ("error: You must be logged in to the server (Unauthorized)", "not accept your login"),
        ("dial tcp: lookup k8s.example.com: no such host", "network and VPN"),
        ("net/http: TLS handshake timeout", "network and VPN"),
        ('error: the server doesn\'t have a resource type "trainjob"', "does not know trainjob"),
        ("Job.batch is invalid: spec.template: field is immutable", "cancel it first"),
        ("one\nerror: something else", "something else"),
        ('The Job "mine" is invalid:\n* spec.a: wrong\n* spec.b: wrong', "spec.b: wrong"),
        ("", "kubectl failed"),
    ],
)  # fmt: skip
def test_an_error_of_kubectl(said: str, meant: str):
    sentence = explain_error(f"Warning: be careful\n{said}")
    assert meant in sentence
    assert sentence == meant or said not in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ("0/2 nodes are available: 1 node(s) had untolerated taint {control-plane: }, 1 "
         "Insufficient nvidia.com/gpu.", "many free nvidia.com/gpu"),
        ('0/1 nodes are available: persistentvolumeclaim "project" not found.',
         "there is no volume claim project: make it by samestep launch --data"),
        ("SchedulingGated: Scheduling is blocked", "its turn in the queue"),
        ("1 node(s) had a new problem. preemption: Preemption is not helpful for scheduling",
         "Unschedulable: 1 node(s) had a new problem."),
    ],
)  # fmt: skip
def test_why_a_pod_has_no_node(message: str, meant: str):
    reason = {"reason": "Unschedulable", "message": message}
    condition = {"type": "PodScheduled", "status": "False", **reason}
    assert meant in explain_pod({"status": {"phase": "Pending", "conditions": [condition]}})


@pytest.mark.parametrize(
    ("reason", "meant"),
    [
        ("ErrImagePull", "its image cannot be pulled: check cluster.image, that it was pushed, and "
         "the namespace's right to pull it: why"),
        ("InvalidImageName", "its image cannot be pulled"),
        ("RunContainerError", "RunContainerError: why: context deadline exceeded"),  # no kubectl's
        ("CreateContainerConfigError", "CreateContainerConfigError: why"),
    ],
)  # fmt: skip
def test_why_a_container_does_not_start(reason: str, meant: str):
    state = {"state": {"waiting": {"reason": reason, "message": "why: context deadline exceeded"}}}
    pod = {"status": {"phase": "Pending", "containerStatuses": [state]}}
    assert explain_pod(pod).startswith(meant)


def test_why_a_container_is_not_created():
    cause = 'MountVolume.SetUp failed for volume "pvc-0a1b" : no such\n  folder'
    late = "Unable to attach or mount volumes: unmounted volumes=[project]: timed out"
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    pod = {"status": {"phase": "Pending", "containerStatuses": [waiting]}}
    assert explain_pod(pod, [late, cause, late]) == " ".join(cause.split())
    assert explain_pod(pod, [late]) == late
    assert explain_pod(pod) == "is being placed, or pulls its image"
    assert explain_pod({"status": {"phase": "Running"}}, [late]) == ""


@pytest.mark.parametrize(
    ("ended", "meant"),
    [
        ({"exitCode": 137, "reason": "OOMKilled"},
         "exit code 137: it used more memory than cluster.memory: raise that"),
        ({"exitCode": 2, "message": "Traceback\nerror: no such key\n"},
         "exit code 2: error: no such key"),
        ({"exitCode": 2, "message": "exit code 2: rank 0: error: changed:\n  lr: 0.1 -> 1\nmore"},
         "exit code 2: rank 0: error: changed: lr: 0.1 -> 1 more"),  # of our entry point
        ({"exitCode": 143, "message": "the end of the log\n"}, "exit code 143: saved and stopped"),
        ({"exitCode": 143, "message": "exit code 143: ended by SIGTERM before the ranks had begun"},
         "exit code 143: ended by SIGTERM before the ranks had begun"),
        ({"exitCode": 1}, "exit code 1"),
        ({"exitCode": 0}, ""),
    ],
)  # fmt: skip
def test_how_a_container_ended(ended: dict, meant: str):
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}
    assert explain_pod({"status": status})[: len(meant) or None] == meant
    # While it runs again, its last end is worth knowing; if it has succeeded since, it is not.
    again = {"state": {"running": {}}, "lastState": {"terminated": ended}}
    assert explain_pod({"status": {"phase": "Running", "containerStatuses": [again]}}) == (
        explain_pod({"status": status})
    )
    again["state"] = {"terminated": {"exitCode": 0}}
    assert explain_pod({"status": {"phase": "Succeeded", "containerStatuses": [again]}}) == ""


def test_an_evicted_pod_is_replaced():
    killed = {"state": {"terminated": {"exitCode": 137}}}
    status = {"phase": "Failed", "reason": "Evicted", "containerStatuses": [killed]}
    low = "The node was low on resource: ephemeral-storage. Threshold quantity: 1, available: 0."
    for message, cause in (
        (low, "The node was low on resource: ephemeral-storage"),
        ('Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ', None),
    ):
        cause = cause or message.strip(". ")
        meant = f"it was evicted ({cause}); another pod replaces it"
        assert explain_pod({"status": status | {"message": message}}) == meant


def lost_pod(deleted_before_s: float | None, *, is_ready: bool = True) -> dict:
    """A pod of which kubelet says nothing any more."""
    conditions = [{"type": "Ready", "status": str(is_ready)}]
    containers = [{"name": "trainer", "ready": True, "state": {"running": {}}}]
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": containers}
    metadata = {"name": "mine-0", "labels": {"samestep/run": "mine"}}
    if deleted_before_s is not None:
        deleted = datetime.now(UTC) - timedelta(seconds=deleted_before_s)
        metadata["deletionTimestamp"] = deleted.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"metadata": metadata, "spec": {"nodeName": "node-a"}, "status": status}


def test_a_lost_node_is_named_with_the_way_out():
    said = explain_pod(lost_pod(600))
    assert said.startswith("its node node-a does not answer, so nothing replaces it")
    assert "kubectl taint nodes node-a node.kubernetes.io/out-of-service=nodeshutdown" in said
    assert "kubectl delete pod mine-0 --force, then samestep cancel mine" in said
    run = {"metadata": {}, "status": {}}
    assert follow.describe_run(run, [lost_pod(600)]) == (
        "waits for mine-0, whose node does not answer"
    )
    assert "evicts its pods" in explain_pod(lost_pod(None, is_ready=False))
    # In its grace period, and as it ought to be.
    for pod in (lost_pod(-100, is_ready=False), lost_pod(None)):
        assert explain_pod(pod) == ""


def test_pods_that_no_limit_counts_are_counted_for_the_user():
    stopped = {"state": {"terminated": {"exitCode": 143}}}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    pods = [
        {"status": {"phase": "Failed", "containerStatuses": [stopped]}},
        {"status": {"phase": "Failed", "conditions": disrupted}},
        {"status": {"phase": "Failed"}},
        {"status": {"phase": "Running"}},
    ]
    cfg = OmegaConf.create({"run_id": "mine"})
    for run, found in (({}, pods), ({"status": {"restarts": 3, "restartsCountTowardsMax": 1}}, [])):
        (line,) = follow.explain_uncounted(cfg, run, found)
        assert line.startswith("mine: pods were evicted, preempted or stopped 2 times")


# The answer of a Kubernetes 1.36, which controllers put into their events. The reasons of the
# events are those in the sources of JobSet, Kubeflow Trainer, the training operator and Kubernetes.
INVALID = (
    'Job.batch "mine-node-0" is invalid: spec.podFailurePolicy.rules[1].onExitCodes.values: '
    "Invalid value: [143,2]: must be ordered"
)


@pytest.mark.parametrize(
    ("kind", "reason", "what"),
    [
        ("JobSet", "JobCreationFailed", "Jobs"),
        ("TrainJob", "TrainJobResourcesCreationFailed", "Jobs"),
        ("PyTorchJob", "FailedCreatePod", "pods"),
        ("Job", "FailedCreate", "pods"),
    ],
)
def test_what_a_controller_cannot_create_is_said_once(kind: str, reason: str, what: str):
    about = {"kind": kind, "name": "mine"}
    rejected = {"reason": reason, "message": INVALID, "involvedObject": about}
    others = [
        {**rejected, "message": "another run", "involvedObject": about | {"name": name}}
        for name in ("min", "mines", "mine-2")
    ]
    cfg = OmegaConf.create({"run_id": "mine"})
    lines = follow.explain_run(cfg, {}, [], [*others, rejected, rejected])
    assert lines == [f"mine: {what} are rejected; {INVALID}"]


@pytest.mark.parametrize("spec", [{"suspend": True}, {"runPolicy": {"suspend": True}}])
def test_a_run_that_waits_in_a_queue_says_what_kueue_said_last(spec: dict):
    cfg = OmegaConf.create({"run_id": "mine"})
    run = {"kind": "Job", "spec": spec}
    assert follow.explain_run(cfg, run, [], []) == ["mine: waits in the queue"]
    events = [
        {"message": message, "involvedObject": {"kind": "Workload", "name": f"job-{name}-3f2a1"}}
        for name, message in (("mine", "no quota"), ("mine", "100m more needed"), ("mine-2", "x"))
    ]
    lines = follow.explain_run(cfg, run, [], events)
    assert lines == ["mine: waits in the queue: 100m more needed"]
    assert follow.explain_run(cfg, {"kind": "Job", "spec": {}}, [], events) == []


def test_a_failed_pytorchjob_says_where_its_logs_are():
    """Its operator removes the pods, whatever the cleanPodPolicy is."""
    cfg = OmegaConf.create({"run_id": "mine", "run_root": "runs"})
    run = {"kind": "PyTorchJob", "status": {"conditions": [FAILED]}}
    (line,) = follow.explain_run(cfg, run, [], [])
    assert line.endswith("the run has left its own in runs/mine/logs on the volume")


def test_a_run_without_a_running_pod_is_pending():
    run = {"metadata": {}, "status": {}}
    pods = [{"status": {"phase": "Pending"}}, {"status": {"phase": "Failed"}}]
    assert follow.describe_run(run, pods) == "is pending: none of its pods runs"
    assert follow.describe_run(run, []) == "is pending: none of its pods runs"
    assert follow.describe_run(run, [*pods, {"status": {"phase": "Running"}}]) == "runs"


def test_status_looks_for_the_note_that_a_run_prints():
    assert follow.NOTE == save_time.NOTE
