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
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from samestep.errors import RunError
from samestep.launch import kubectl
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
    assert "no errors in the configuration" in result.stdout
    assert "the cluster would accept it" in result.stdout
    assert list(cluster.objects.values()) == [claim]
    posts = [path for method, path in cluster.requests if method == "POST"]
    assert len(posts) == 4  # also a pod, as its controller would make it
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
        lines += until("[pod/mine-1-bbbbb/trainer] hello", process.stdout)
        cluster.logs["mine-0-aaaaa"].append("epoch 1")
        lines += until("[pod/mine-0-aaaaa/trainer] epoch 1", process.stdout)
        cluster.objects.pop(("v1 Pod", "default", "mine-0-aaaaa"))  # evicted, and replaced
        cluster.logs["mine-0-ccccc"] = ["continued"]
        cluster.pod("mine-0-ccccc", job(cluster), RUNNING)
        lines += until("[pod/mine-0-ccccc/trainer] continued", process.stdout)
        cluster.logs["mine-0-ccccc"].append("test/accuracy 0.97")
        end(cluster, COMPLETE)
        lines += list(process.stdout)
        assert process.wait(60) == 0, lines
    printed = [line for line in lines if line.startswith("[")]
    assert len(printed) == len(set(printed)) == 6
    assert lines[-2:] == ["[pod/mine-0-ccccc/trainer] test/accuracy 0.97\n", "mine: Complete\n"]


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
    assert lines == [f"[pod/mine-0-aaaaa/trainer] {word}\n" for word in ("one", "two", "three")]
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


def test_status_has_reasons_a_table_and_the_last_lines(cluster):
    submit(cluster)
    cluster.logs["mine-0-aaaaa"] = ["plan", "epoch 3/20, val/accuracy 0.91"]
    cluster.pod("mine-0-aaaaa", job(cluster), RUNNING)
    waiting = {"reason": "ImagePullBackOff", "message": "no such tag"}
    state = {"name": "trainer", "restartCount": 2, "state": {"waiting": waiting}, "image": "ours:2"}
    cluster.pod("mine-1-bbbbb", job(cluster), {"phase": "Pending", "containerStatuses": [state]})
    result = launch(cluster, "status")
    assert (result.returncode, result.stderr) == (0, "")
    title, reason, *table, last = result.stdout.splitlines()
    assert title == "Job mine: runs"
    assert reason.startswith("mine-1-bbbbb: its image cannot be pulled: check cluster.image")
    assert [line.split()[0] for line in table] == ["NAME", "mine-0-aaaaa", "mine-1-bbbbb"]
    assert last == "[pod/mine-0-aaaaa/trainer] epoch 3/20, val/accuracy 0.91"


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


REJECTED = 'Job.batch "mine-node-0" is invalid: spec.x: Invalid value: [143,2]: must be ordered'


def test_status_asks_for_the_events_of_a_controller(cluster):
    submit(cluster, "cluster=jobset")
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.123456Z", time.gmtime(time.time() + 1))
    cluster.put({
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "mine.1"}, "type": "Warning",
        "involvedObject": {"kind": "JobSet", "name": "mine"}, "reason": "JobCreationFailed",
        "message": REJECTED, "eventTime": stamp,
    })  # fmt: skip
    result = type_in(cluster, "status", "mine")
    assert (result.returncode, result.stderr) == (0, "")
    title, refused = result.stdout.splitlines()
    assert title == "JobSet mine: is pending: none of its pods runs"
    assert refused == f"mine: Jobs are rejected; {REJECTED}"


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
