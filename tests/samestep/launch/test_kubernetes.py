"""Submit, logs, status and cancel, as a user types them; the real kubectl, and a stand-in server.

The server is tests/apiserver.py. What a real cluster does is tested in tests/e2e.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from samestep.errors import RunError
from samestep.launch import follow as follow_module
from samestep.launch import kubectl, kubectl_errors
from tests import launching
from tests.apiserver import Refusal, Server, serve
from tests.conftest import ROOT, environment, run

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
HERE = str(ROOT / "tests/samestep_here.py")
LAUNCH = (HERE, "launch")
WORDS = ["cluster=k8s", "cluster.image=ghcr.io/me/project:1.2.3", "trainer.num_nodes=2"]
RUNNING = {
    "phase": "Running",
    "containerStatuses": [{"name": "trainer", "restartCount": 0, "state": {"running": {}}}],
}
COMPLETE = {"type": "Complete", "status": "True"}
FAILED = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Server]:
    with serve() as server:
        server.variables = variables(server, tmp_path)
        yield server


def variables(server, tmp_path):
    server.folder = tmp_path  # in which the user types
    return {"KUBECONFIG": server.kubeconfig(tmp_path), "KUBECACHEDIR": str(tmp_path)}


def launch(server, action, *words, run_id="mine"):
    line = launching.line_of(action, run_id, *WORDS, *words)
    return type_in(server, *line, RUN_ID=run_id)


def type_in(server, *words, **variables):
    """Call ``samestep`` with these words only."""
    return launching.samestep(*words, cwd=server.folder, **variables, **server.variables)


def submit(server, *words):
    result = launch(server, "submit", *words)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def job(server):
    (found,) = server.of_kind("Job")
    return found


def end(server, condition, phase="Succeeded"):
    """The run ends: first its pods, then itself."""
    for pod in server.of_kind("Pod"):
        state = {"name": "trainer", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}
        server.pod(
            pod["metadata"]["name"], job(server), {"phase": phase, "containerStatuses": [state]}
        )
    server.put(job(server) | {"status": {"conditions": [condition]}})


def test_check_lets_the_cluster_look_and_leaves_nothing_there(cluster):
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "project"}}
    cluster.put(claim)
    result = launch(cluster, "check")
    assert (result.returncode, result.stderr) == (0, "")
    assert "no mistakes in NetworkPolicy, Service, Job" in result.stdout
    assert "the cluster would accept it" in result.stdout
    assert list(cluster.objects.values()) == [claim]
    posts = [path for method, path in cluster.requests if method == "POST"]
    assert len(posts) == 3
    assert all("dryRun=All" in path and "fieldValidation=Strict" in path for path in posts)


def test_check_finds_that_the_claim_is_missing(cluster):
    result = launch(cluster, "check")
    assert result.returncode == 1
    assert "cluster.volume=project: there is no such claim in the namespace" in result.stderr
    assert (
        "; make it by samestep launch cluster=k8s cluster.volume_size=SIZE --data" in result.stderr
    )
    assert launch(cluster, "check", "cluster.volume=null").returncode == 0

    def refuse(method, path):
        if "persistentvolumeclaims" in path:
            raise Refusal(403, "Forbidden", 'User "me" cannot get resource "claims"')

    cluster.refuse = refuse
    assert launch(cluster, "check").returncode == 0


def test_check_fails_where_the_cluster_refuses(cluster):
    def refuse(method, path):
        if method == "POST":
            raise Refusal(403, "Forbidden", 'User "me" cannot create resource "services"')

    cluster.refuse = refuse
    result = launch(cluster, "check")
    assert result.returncode == 1
    assert "me may not create services here" in result.stderr


def test_check_forgives_a_dry_run_that_needs_the_objects_before_it(cluster):
    """Trainer's webhook looks for the TrainingRuntime, which the dry run did not leave there."""

    def refuse(method, path):
        if method == "POST" and path.endswith("/trainjobs"):
            text = "specified trainingRuntime must be created before the TrainJob is created"
            raise Refusal(422, "Invalid", text)

    cluster.refuse = refuse
    result = launch(cluster, "check", "cluster=kubeflow")
    assert result.returncode == 1
    assert "cluster.volume=project: there is no such claim in the namespace" in result.stderr
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "project"}}
    cluster.put(claim)
    result = launch(cluster, "check", "cluster=kubeflow")
    assert (result.returncode, result.stderr) == (0, "")
    assert "the cluster can judge the TrainJob only when it is submitted" in result.stdout


def test_check_needs_no_cluster(tmp_path):
    result = run(*LAUNCH, *WORDS, "--check", KUBECONFIG=str(tmp_path / "none"))
    assert (result.returncode, result.stderr) == (0, "")
    assert "no cluster was asked; kubectl knows no cluster" in result.stdout


def test_check_and_submit_without_kubectl(tmp_path):
    result = run(*LAUNCH, *WORDS, "--check", PATH=str(tmp_path))
    assert result.returncode == 0
    assert "kubectl: no such command on this machine" in result.stdout
    result = run(*LAUNCH, *WORDS, PATH=str(tmp_path))
    assert result.returncode == 1
    assert "kubectl: no such command on this machine" in result.stderr


def test_submitting_twice_is_submitting_once(cluster):
    first, second = submit(cluster), submit(cluster)
    assert "job.batch/mine created" in first
    assert "  samestep logs mine\n" in first
    assert "job.batch/mine unchanged" in second
    assert len(cluster.objects) == 3


def test_a_running_run_is_not_changed(cluster):
    submit(cluster)
    before = job(cluster)
    result = launch(cluster, "submit", "trainer.max_epochs=3")
    assert result.returncode == 1
    assert "runs already, with other overrides; cancel it first" in result.stderr
    assert job(cluster) == before


def test_a_failed_run_starts_anew_and_a_finished_one_only_with_other_words(cluster):
    submit(cluster)
    first = job(cluster)["metadata"]["uid"]
    end(cluster, FAILED)
    assert "failed before, and starts again" in submit(cluster)
    second = job(cluster)["metadata"]["uid"]
    assert second != first
    end(cluster, COMPLETE)
    assert "is finished, nothing to do" in submit(cluster)
    assert job(cluster)["metadata"]["uid"] == second
    assert "finished before, and starts again" in submit(cluster, "trainer.max_epochs=30")
    assert job(cluster)["metadata"]["uid"] != second


def test_the_image_of_the_example_is_not_submitted(cluster):
    result = launch(cluster, "submit", "cluster.image=registry.example.com/project:0.1.0")
    assert result.returncode == 2
    assert "is only an example" in result.stderr
    assert cluster.objects == {}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["cluster=jobset"], "JobSet"),
        (["cluster=pytorchjob"], "PyTorchJob"),
        (["cluster=elastic", "trainer.num_nodes=1"], "Job"),
        (["cluster=elasticjob", "trainer.num_nodes=1"], "ElasticJob"),
    ],
)
def test_every_target_comes_and_goes(cluster, words, kind):
    submit(cluster, *words)
    assert [item["metadata"]["name"] for item in cluster.of_kind(kind)] == ["mine"]
    result = type_in(cluster, "cancel", "mine")
    assert (result.returncode, result.stderr) == (0, "")
    assert "mine: cancelled; the same submit continues it" in result.stdout
    assert cluster.objects == {}


@pytest.mark.parametrize("words", [["cluster=k8s"], ["cluster=kubeflow"], ["cluster=elastic"]])
def test_what_a_run_needs_goes_when_the_run_goes(cluster, words):
    """As after cluster.ttl_s; the claim belongs to nobody, and another run keeps its objects."""
    words = [*words, "trainer.num_nodes=1"]
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "project"}}
    cluster.put(claim)
    submit(cluster, *words)
    submit(cluster, *words)  # changes nothing
    kind = "TrainJob" if "cluster=kubeflow" in words else "Job"
    (run,) = cluster.of_kind(kind)
    owners = [item["metadata"].get("ownerReferences") for item in cluster.objects.values()]
    references = [owner for owner in owners if owner is not None]
    assert len(references) == len(cluster.objects) - 2  # the run, and the claim
    for (reference,) in references:
        assert (reference["kind"], reference["uid"]) == (kind, run["metadata"]["uid"])
        assert "blockOwnerDeletion" not in reference  # the pods need their Service while they save
    cluster.expire(run)
    assert [key[2] for key in cluster.objects] == ["project"]


@pytest.mark.parametrize(("target", "policy"), [("kubeflow", "Background"), ("k8s", "Foreground")])
def test_how_the_object_of_a_run_is_deleted(cluster, target, policy):
    """In the foreground a TrainJob would lose its TrainingRuntime first, and never go."""
    submit(cluster, f"cluster={target}", "trainer.num_nodes=1")
    result = type_in(cluster, "cancel", "mine")
    assert (result.returncode, result.stderr) == (0, "")
    assert cluster.policies[0] == policy


def test_a_run_starts_where_its_user_may_not_change_objects(cluster):
    def refuse(method, path):
        if method == "PATCH":
            raise Refusal(403, "Forbidden", 'User "me" cannot patch resource "services" in API')

    cluster.refuse = refuse
    printed = submit(cluster)
    assert "mine: NetworkPolicy, Service will stay when the run is removed; me may not" in printed
    assert "samestep logs mine" in printed


def test_the_server_refuses_what_its_schema_allows(cluster):
    """The order of these codes kept JobSet and TrainJob from starting on any cluster."""
    submit(cluster)
    wrong = deepcopy(job(cluster))
    wrong["metadata"]["name"] = "other"
    wrong["spec"]["podFailurePolicy"]["rules"][2]["onExitCodes"]["values"] = [143, 2]
    with pytest.raises(
        Refusal, match=r'Job "other" is invalid: .*values=\[143, 2\]: must be in asc'
    ):
        cluster.judge("batch/v1 Job", "default", None, wrong, is_strict=False)


def test_a_job_that_a_controller_cannot_create_leaves_an_event(cluster):
    submit(cluster, "cluster=jobset")
    (jobset,) = cluster.of_kind("JobSet")
    cluster.make_jobs(jobset)
    assert [item["metadata"]["name"] for item in cluster.of_kind("Job")] == ["mine-node-0"]
    assert cluster.of_kind("Event") == []
    wrong = deepcopy(jobset)
    (replicated,) = wrong["spec"]["replicatedJobs"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    rules[1]["onExitCodes"]["values"] = [143, 2]
    cluster.make_jobs(wrong)
    (event,) = cluster.of_kind("Event")
    assert (event["reason"], event["type"]) == ("JobCreationFailed", "Warning")
    assert event["involvedObject"]["name"] == "mine"
    assert 'Job "mine-node-0" is invalid: spec.podFailurePolicy.rules[1]' in event["message"]
    cluster.expire(jobset)
    assert cluster.of_kind("Job") == []


def follow(server, *words):
    """The logs action, running."""
    command = [sys.executable, "-u", HERE, "logs", "mine", *words]
    return subprocess.Popen(
        command, cwd=server.folder, env=environment(RUN_ID="mine", **server.variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until(text, stream):
    """Read lines until one has ``text``."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text} is not in {lines}")


def test_logs_follow_pods_that_come_late_and_again_until_the_run_ends(cluster):
    submit(cluster)
    short = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    cluster.logs = {"mine-0-aaaaa": ["plan", "epoch 0"], "mine-1-bbbbb": ["hello"]}
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    pending = {"phase": "Pending", "conditions": [condition | {"message": short}]}
    cluster.pod("mine-1-bbbbb", job(cluster), pending)
    with follow(cluster) as process:
        lines = until("no node has that many free nvidia.com/gpu: wait", process.stdout)
        cluster.pod("mine-1-bbbbb", job(cluster), RUNNING)
        lines += until("[1-bbbbb] hello", process.stdout)
        cluster.logs["mine-0-aaaaa"].append("epoch 1")
        lines += until("[0-aaaaa] epoch 1", process.stdout)
        cluster.objects.pop(("v1 Pod", "default", "mine-0-aaaaa"))  # evicted, and replaced
        cluster.logs["mine-0-ccccc"] = ["continued"]
        cluster.pod("mine-0-ccccc", job(cluster), RUNNING)
        lines += until("[0-ccccc] continued", process.stdout)
        cluster.logs["mine-0-ccccc"].append("test/accuracy 0.97")
        end(cluster, COMPLETE)
        lines += list(process.stdout)
        assert process.wait(60) == 0, lines
    printed = [line for line in lines if line.startswith("[")]
    assert len(printed) == len(set(printed)) == 6
    assert lines[-2:] == ["[0-ccccc] test/accuracy 0.97\n", "mine: Complete\n"]


def test_logs_end_when_nobody_reads_them_any_more(cluster):
    submit(cluster)
    cluster.logs["mine-0-aaaaa"] = ["one"]
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    with follow(cluster) as process:
        until("one", process.stdout)
        process.stdout.close()
        cluster.logs["mine-0-aaaaa"].append("two")
        assert process.wait(60) == 141


def test_logs_go_on_where_a_connection_broke(cluster):
    submit(cluster)
    cluster.logs["mine-0-aaaaa"] = ["one", "two", "three"]
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    cluster.cuts = 1
    with follow(cluster) as process:
        lines = until("three", process.stdout)
        end(cluster, COMPLETE)
        assert process.wait(60) == 0
    assert lines == ["[0-aaaaa] one\n", "[0-aaaaa] two\n", "[0-aaaaa] three\n"]
    assert cluster.cuts == 0


def test_logs_outlive_a_cluster_that_does_not_answer_for_a_while(cluster):
    submit(cluster)
    cluster.logs["mine-0-aaaaa"] = ["one"]
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    asked = threading.Event()

    def refuse(method, path):
        asked.set()
        raise Refusal(503, "ServiceUnavailable", "the server is being upgraded")

    with follow(cluster) as process:
        until("one", process.stdout)
        cluster.refuse = refuse
        assert asked.wait(60)
        cluster.refuse = lambda method, path: None
        end(cluster, COMPLETE)
        assert process.wait(60) == 0


def test_logs_wait_for_pods_and_fail_as_the_run_does(cluster):
    submit(cluster)
    message = 'pods "x" is forbidden: exceeded quota: {}, requested: memory=16Gi, used: memory=8Gi'
    for team, at in (("team", time.time() + 60), ("stale", time.time() - 3600)):
        meta, about = {"name": team}, {"name": "mine"}
        event = {"metadata": meta, "involvedObject": about, "reason": "FailedCreate"}
        event |= {"lastTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))}
        event |= {"apiVersion": "v1", "kind": "Event", "message": message.format(team)}
        event["type"] = "Warning"
        cluster.put(event)
    with follow(cluster) as process:
        until("the namespace's quota team is used up: memory=16Gi", process.stdout)
        end(cluster, FAILED)
        rest = process.stdout.read()
        assert process.wait(60) == 1
    assert "mine: Failed (BackoffLimitExceeded)" in rest
    assert "stale" not in rest


def test_status_is_one_table(cluster):
    submit(cluster)
    cluster.logs["mine-0-aaaaa"] = ["plan", "epoch 3/20, val/accuracy 0.91"]
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    waiting = {"reason": "ImagePullBackOff", "message": "no such tag"}
    state = {"name": "trainer", "restartCount": 2, "state": {"waiting": waiting}, "image": "ours:2"}
    cluster.pod("mine-1-bbbbb", job(cluster), {"phase": "Pending", "containerStatuses": [state]})
    result = launch(cluster, "status")
    assert (result.returncode, result.stderr) == (0, "")
    title, head, first, second = result.stdout.splitlines()
    assert title == "Job mine: runs"
    assert head.split() == ["pod", "node", "state", "restarts", "age", "last", "line"]
    assert first.split()[:4] == ["mine-0-aaaaa", "node-a", "Running", "0"]
    assert first.endswith("epoch 3/20, val/accuracy 0.91")
    assert "Pending: its image ours:2 cannot be pulled: check cluster.image" in second


def test_cancel_gives_the_pods_time_and_leaves_nothing(cluster):
    submit(cluster)
    for name in ("mine-0-aaaaa", "mine-1-bbbbb"):
        cluster.pod(name, job(cluster), RUNNING)
    other = {"app.kubernetes.io/instance": "other"}
    cluster.put({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x", "labels": other}})
    cluster.grace_s = 2
    result = launch(cluster, "cancel")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "mine: its pods have 120 seconds to save",
        "mine: waits for 2 pods to end",
        "mine: cancelled; the same submit continues it",
    ]
    assert [key[2] for key in cluster.objects] == ["x"]
    deletions = [path for method, path in cluster.requests if method == "DELETE"]
    assert "/jobs/mine" in deletions[0]  # the Service and the policy go when the pods have gone
    again = launch(cluster, "cancel")
    assert (again.returncode, again.stdout) == (0, "mine: nothing to cancel\n")


def test_cancel_of_a_run_that_has_ended_does_not_say_that_it_cancelled(cluster):
    submit(cluster)
    del cluster.objects["batch/v1 Job", "default", "mine"]  # longer ago than cluster.ttl_s
    result = launch(cluster, "cancel")
    assert result.stdout == "mine: had ended; what it had left in the cluster is removed\n"
    assert cluster.objects == {}


@pytest.mark.parametrize("action", ["cancel", "status", "logs"])
def test_a_namespace_that_does_not_exist_is_no_empty_one(cluster, action):
    result = launch(cluster, action, "cluster.namespace=ml")
    assert result.returncode == 1
    assert "there is no namespace ml" in result.stderr
    assert result.stdout == ""


# The answer of a Kubernetes 1.36, which controllers put into their events. The reasons of the
# events are those in the sources of JobSet, Kubeflow Trainer, the training operator and Kubernetes.
REFUSED = (
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
def test_what_a_controller_cannot_create_is_said_once(kind, reason, what):
    now = "2026-11-21T10:00:00Z"
    about = {"kind": kind, "name": "mine"}
    refused = {"reason": reason, "message": REFUSED, "involvedObject": about}
    others = [
        {**refused, "message": "another run", "involvedObject": about | {"name": name}}
        for name in ("min", "mines", "mine-2")
    ]
    cfg, run = OmegaConf.create({"run_id": "mine"}), {"metadata": {"creationTimestamp": now}}
    lines = follow_module.explain_missing_pods(cfg, run, [*others, refused, refused])
    assert list(lines) == [f"mine: {what} are refused; {REFUSED}"]


def test_status_asks_for_the_events_of_a_controller(cluster):
    submit(cluster, "cluster=jobset")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.123456Z", time.gmtime(time.time() + 1))
    cluster.put({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "mine.1"}, "type": "Warning",
        "involvedObject": {"kind": "JobSet", "name": "mine"}, "reason": "JobCreationFailed",
        "message": REFUSED, "eventTime": stamp,
    })  # fmt: skip
    result = type_in(cluster, "status", "mine")
    assert (result.returncode, result.stderr) == (0, "")
    title, refused, _ = result.stdout.splitlines()
    assert title == "JobSet mine: is pending: none of its pods runs"
    assert refused == f"mine: Jobs are refused; {REFUSED}"


@pytest.mark.parametrize("action", ["logs", "status"])
def test_what_is_not_there_is_said(cluster, action):
    result = launch(cluster, action)
    assert result.returncode == 1
    assert "mine: there is no such run; it was not submitted, was cancelled" in result.stderr


def test_logs_end_when_the_run_is_cancelled(cluster):
    submit(cluster)
    cluster.logs["mine-0-aaaaa"] = ["epoch 0"]
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    with follow(cluster) as process:
        until("epoch 0", process.stdout)
        assert launch(cluster, "cancel").returncode == 0
        rest = process.stdout.read()
        assert process.wait(60) == 1
    assert "mine: was removed before it ended" in rest


def test_a_cluster_without_the_operator(tmp_path):
    with serve(without=("JobSet",)) as server:
        server.variables = variables(server, tmp_path)
        for action in ("submit", "check"):
            result = launch(server, action, "cluster=jobset")
            assert result.returncode == 1
            assert "the cluster does not know" in result.stderr
            assert "or choose cluster=k8s" in result.stderr


def test_a_namespace_that_is_missing(cluster):
    result = launch(cluster, "submit", "cluster.namespace=ml")
    assert result.returncode == 1
    assert "there is no namespace ml" in result.stderr


def test_the_namespace_is_given_to_kubectl_only_if_there_is_one():
    without, with_one = (
        OmegaConf.create({"cluster": {"namespace": namespace}}) for namespace in (None, "ml")
    )
    assert kubectl.build_command(without, "get", "pods") == ["kubectl", "get", "pods"]
    assert kubectl.build_command(with_one, "get", "pods") == ["kubectl", "-n", "ml", "get", "pods"]


def test_a_kubectl_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(kubectl, "HANGS_S", 1)
    cfg = OmegaConf.create({"cluster": {"namespace": None}})
    with pytest.raises(RunError, match="kubectl get: no answer in 2 seconds"):
        kubectl.call(cfg, "get", "pods", timeout_s=1)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("The connection to the server localhost:8080 was refused", "knows no cluster"),
        ("The connection to the server 10.0.0.1:6443 was refused - did", "does not answer"),
        ('error: context "x" does not exist', "knows no cluster"),
        ("error: current-context is not set", "knows no cluster"),
        ("dial tcp: lookup k8s.example.com: no such host", "network and VPN"),
        ("net/http: TLS handshake timeout", "network and VPN"),
        ("error: You must be logged in to the server (Unauthorized)", "log in again"),
        ('Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot create resource '
         '"jobs" in API group "batch" in the namespace "ml"', "me may not create jobs here"),
        ('error: resource mapping not found for name: "x": no matches for kind "JobSet" in version '
         '"jobset.x-k8s.io/v1alpha2"', "does not know JobSet (jobset.x-k8s.io/v1alpha2)"),
        ('error: the server doesn\'t have a resource type "trainjobs"', "does not know trainjobs"),
        ('Error from server (NotFound): namespaces "ml" not found', "there is no namespace ml"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
         "Pod Security level restricted:latest: runAsNonRoot != true"),
        ('pods "x" is forbidden: exceeded quota: team, requested: cpu=8, used: 0',
         "quota team is used up: cpu=8"),
        ("Job.batch is invalid: spec.template: field is immutable", "cancel it first"),
        ('strict decoding error: unknown field "spec.x"', "does not know the field spec.x"),
        ('x509: certificate signed by unknown authority', "certificate"),
        ("error: something else", "something else"),
    ],
)  # fmt: skip
def test_what_kubectl_says_in_one_sentence(said, meant):
    sentence = kubectl_errors.explain_error(f"Warning: be careful\n{said}")
    assert meant in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("reason", "message", "meant"),
    [
        ("Unschedulable", "0/2 nodes are available: 1 node(s) had untolerated taint "
         "{control-plane: }, 1 Insufficient nvidia.com/gpu.", "many free nvidia.com/gpu"),
        ("Unschedulable", "0/2 nodes are available: 2 Insufficient cpu.", "much free cpu"),
        ("Unschedulable", '0/1 nodes are available: persistentvolumeclaim "project" not found.',
         "there is no volume claim project: make it by samestep launch cluster=k8s cluster.volume_size=SIZE "
         "--data, or name another by cluster.volume"),
        ("Unschedulable", "unbound immediate PersistentVolumeClaims", "volume is not ready"),
        ("Unschedulable", "1 node(s) had untolerated taint {nvidia.com/gpu: present}",
         "have the taint nvidia.com/gpu"),
        ("Unschedulable", "1 node(s) didn't match Pod's node affinity/selector", "node_selector"),
        ("SchedulingGated", "Scheduling is blocked", "its turn in the queue"),
    ],
)  # fmt: skip
def test_why_a_pod_has_no_node(reason, message, meant):
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    pod = {"status": {"phase": "Pending", "conditions": [condition]}}
    assert meant in kubectl_errors.explain_waiting(pod)


@pytest.mark.parametrize(
    ("reason", "meant"),
    [
        ("ErrImagePull", "cluster.image"),
        ("ErrImageNeverPull", "cluster.image"),
        ("InvalidImageName", "cluster.image"),
        ("CrashLoopBackOff", "fails again and again"),
        ("CreateContainerConfigError", "cluster.secret"),
    ],
)
def test_why_a_container_does_not_start(reason, meant):
    state = {"state": {"waiting": {"reason": reason}}}
    assert meant in kubectl_errors.explain_waiting(
        {"status": {"phase": "Pending", "containerStatuses": [state]}}
    )


NFS = (
    'MountVolume.SetUp failed for volume "pvc-0a1b" : mount failed: exit status 32\n'
    "Mounting command: mount\nOutput: mount.nfs: No such file or directory"
)
LATE = (
    "Unable to attach or mount volumes: unmounted volumes=[project], unattached volumes=[], failed "
    "to process volumes=[]: timed out waiting for the condition"
)
TAKEN = (
    'Multi-Attach error for volume "pvc-0a1b" Volume is already exclusively attached to one node '
    "and can't be attached to another"
)


@pytest.mark.parametrize(
    ("reason", "messages", "meant"),
    [
        ("FailedMount", [LATE, NFS, LATE], "its volume pvc-0a1b cannot be mounted: mount failed: "
         "exit status 32 Mounting command: mount Output: mount.nfs: No such file or directory;"),
        ("FailedMount", [LATE], "its volume project cannot be mounted: timed out waiting for"),
        ("FailedAttachVolume", [TAKEN], "its volume pvc-0a1b cannot be mounted: Volume is already"),
        ("FailedCreatePodSandBox", ["no address is free"], "no address is free"),
        ("Pulling", [NFS], "is being placed, or pulls its image"),
    ],
)  # fmt: skip
def test_why_a_container_is_not_created(reason, messages, meant):
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    status = {"phase": "Pending", "containerStatuses": [waiting]}
    pod = {"metadata": {"name": "mine-0-aaaaa"}, "status": status}
    about = {"kind": "Pod", "name": "mine-0-aaaaa"}
    warnings = [{"involvedObject": about, "reason": reason, "message": m} for m in messages]
    other = {"involvedObject": about | {"name": "x"}, "reason": "FailedMount", "message": "other"}
    state = follow_module.describe_pod(pod, [*warnings, other])
    assert state.startswith(f"Pending: {meant}")
    status["phase"] = "Running"
    assert follow_module.describe_pod(pod, warnings) == "Running"


def test_a_run_without_a_running_pod_is_pending():
    run = {"metadata": {}, "status": {}}
    pods = [{"status": {"phase": "Pending"}}, {"status": {"phase": "Failed"}}]
    assert follow_module.describe_run(run, pods) == "is pending: none of its pods runs"
    assert follow_module.describe_run(run, []) == "is pending: none of its pods runs"
    assert follow_module.describe_run(run, [*pods, {"status": {"phase": "Running"}}]) == "runs"


def test_a_pod_that_has_saved_is_no_failure():
    over = {"exitCode": 143, "reason": "Error", "message": "the end of the log\n"}
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": over}}]}
    pod = {"metadata": {"name": "mine-0-aaaaa"}, "status": status}
    assert follow_module.describe_pod(pod, []) == "saved and stopped (143)"
    over["message"] = "exit code 143: ended by SIGTERM before the ranks had started"
    state = follow_module.describe_pod(pod, [])
    assert state == "ended by SIGTERM before the ranks had started (143)"


def test_a_cause_of_several_lines_is_kept_whole():
    changed = (
        "error: runs/mine holds a run with another configuration:\n  model.optimizer.lr: 0.003 -> "
        "0.02\nuse another RUN_ID"
    )
    for message in (f"exit code 2: rank 0: {changed}", f"plan\nerror: before\n{changed}\n"):
        over = {"exitCode": 2, "reason": "Error", "message": message}
        pod = {"status": {"containerStatuses": [{"state": {"terminated": over}}]}}
        found = kubectl_errors.explain_exit(pod)
        assert found.removeprefix("Error, exit code 2: ").removeprefix("rank 0: ") == (
            "error: runs/mine holds a run with another configuration: model.optimizer.lr: 0.003 -> "
            "0.02 use another RUN_ID"
        )


def test_what_has_no_time_of_the_container_is_no_time(cluster, capsys):
    """kubelet writes its own errors into a log, and a progress bar has parts without a time."""
    times = ["2026-01-01T00:00:00.1Z", "2026-01-01T00:00:01.1+01:00"]
    own = "failed to try resolving symlinks in path"
    folder = cluster.folder / "bin"
    folder.mkdir()
    text = f"{own}\n{times[0]} one\rtwo\n{times[1]} three\n"
    (folder / "kubectl").write_text(f"#!{sys.executable}\nprint({text!r}, end='')\n")
    (folder / "kubectl").chmod(0o755)
    cfg = OmegaConf.create({"run_id": "mine", "cluster": {"namespace": None}})
    pod = {"metadata": {"name": "mine-0"}, "spec": {"containers": [{}]}}
    container = {"name": "trainer", "state": {"running": {}}}
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{before}"
    try:
        first = follow_module.Stream(cfg, pod, container)
        first.join()
        again = follow_module.Stream(cfg, pod, container, before=first)
        again.join()
    finally:
        os.environ["PATH"] = before
    assert first.last_time == times[1]
    assert f"--since-time={times[1]}" in again.command
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"[0] {text}" for text in (own, "one", "two", "three")]  # each once


def test_how_a_container_ended():
    over = {"exitCode": 137, "reason": "OOMKilled"}
    pod = {"status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": over}}]}}
    assert "exit code 137 (it used more memory than cluster.memory" in kubectl_errors.explain_exit(
        pod
    )
    over |= {"exitCode": 2, "reason": "Error", "message": "error: a\nerror: no such key\n"}
    assert kubectl_errors.explain_exit(pod) == "Error, exit code 2: error: no such key"
    over["exitCode"] = 0
    assert kubectl_errors.explain_exit(pod) == ""


def test_a_container_that_has_succeeded_since_has_not_failed():
    before = {"terminated": {"exitCode": 143, "reason": "Error"}}
    container = {"state": {"terminated": {"exitCode": 0}}, "lastState": before}
    pod = {"status": {"phase": "Succeeded", "containerStatuses": [container]}}
    assert kubectl_errors.explain_exit(pod) == ""
    container["state"] = {"running": {}}  # while it runs again, its last end is worth knowing
    assert kubectl_errors.explain_exit(pod) == "saved and stopped (143)"


def test_a_suspended_pytorchjob_waits_in_the_queue():
    cfg = OmegaConf.create({"run_id": "mine", "run_root": "runs"})
    run = {"kind": "PyTorchJob", "spec": {"runPolicy": {"suspend": True}}}
    assert [*follow_module.explain_missing_pods(cfg, run, [])] == ["mine: waits in the queue"]


def test_a_failed_pytorchjob_says_where_its_logs_are():
    """Its operator removes the pods, whatever the cleanPodPolicy is."""
    cfg = OmegaConf.create({"run_id": "mine", "run_root": "runs"})
    run = {"kind": "PyTorchJob", "status": {"conditions": [FAILED]}}
    (line,) = follow_module.explain_missing_pods(cfg, run, [])
    assert line.endswith("the run has left its own in runs/mine/logs on the volume")
