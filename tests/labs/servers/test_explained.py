"""What the commands say of the causes that people meet, from the words of real servers."""

import re

import pytest
import yaml

from tests.labs.servers.conftest import Cluster, documents_of, plant, until

OF_JOBSET = "spec.replicatedJobs.0.template.spec"
TRAINER = "spec.template.spec.containers.0"  # of a Job
pytestmark = pytest.mark.servers


def test_warnings_of_the_server_are_shown(cluster: Cluster) -> None:
    twice = "cluster.env=[{name: A, value: x}, {name: A, value: y}]"
    for flags in (["--check"], []):
        words = [*flags, *cluster.words("k8s"), twice]
        done = cluster.samestep("launch", *words, RUN_ID="mine")
        assert done.returncode == 0, done.stderr
        assert 'hides previous definition of "A"' in done.stderr


def test_status_says_that_the_namespace_rejects_the_pods(cluster: Cluster) -> None:
    """The server accepts a Job with such pods, so nobody hears of it but its controller."""
    documents = documents_of(cluster, "k8s")
    plant(documents[-1], f"{TRAINER}.securityContext.capabilities", None)
    cluster.apply(*documents)
    said = until(
        lambda: find(cluster, "pods are rejected", "mine", *cluster.words("k8s")), pause_s=1
    )
    assert "Pod Security level restricted" in said
    assert "unrestricted capabilities" in said


def test_status_says_why_no_pod_starts(cluster: Cluster) -> None:
    for number, (words, said) in enumerate(
        (
            (["cluster.cpus=100"], "that much free cpu"),
            (["cluster.memory=900Gi"], "that much free memory"),
            (["cluster.node_selector={kind: h100}"], "cluster.node_selector"),
            (["cluster.node_selector={kubernetes.io/hostname: node-c}"], "cluster.tolerations"),
            (["trainer.accelerator=gpu", "trainer.devices=9"], "nvidia.com/gpu"),
        )
    ):
        assert cluster.launch("k8s", f"mine-{number}", *words).returncode == 0
        assert until(lambda run=f"mine-{number}", said=said: find(cluster, said, run), pause_s=1)


def test_status_says_that_the_quota_is_used_up(cluster: Cluster) -> None:
    """Other runs may use it up between the launch and the replacement of a pod."""
    assert cluster.launch("k8s", "mine").returncode == 0
    pods = cluster.until_training("mine")
    quota = {"kind": "ResourceQuota", "spec": {"hard": {"pods": "1"}}}
    cluster.apply({"apiVersion": "v1", "metadata": {"name": "small"}} | quota)
    until(lambda: cluster.get("resourcequotas", "small")["status"].get("used") == {"pods": "2"})
    cluster.delete("pods", pods[0]["metadata"]["name"])
    assert "small" in until(lambda: find(cluster, "quota"), pause_s=1)


def find(cluster: Cluster, said: str, run_id: str = "mine", *words: str) -> str:
    """The line of ``samestep status`` that says it; nothing if none does yet."""
    done = cluster.samestep("status", run_id, *words)
    lines = [line for line in done.stdout.splitlines() if re.search(said, line)]
    return lines[0] if lines else ""


def test_a_job_that_a_controller_may_not_create_is_explained(cluster: Cluster) -> None:
    """JobSet does not judge the Jobs in it: their server does, when nobody waits for its answer."""
    documents = documents_of(cluster, "jobset")
    plant(documents[-1], f"{OF_JOBSET}.podFailurePolicy.rules.1.onExitCodes.values", [143, 2])
    cluster.apply(*documents)
    words = cluster.words("jobset")
    assert "must be ordered" in until(
        lambda: find(cluster, "are rejected", "mine", *words), pause_s=1
    )
    assert cluster.samestep("cancel", "mine", *words).returncode == 0


def test_a_cluster_that_does_not_answer_is_said_to_be_one(cluster: Cluster) -> None:
    closed = cluster.kubeconfig_of(server="https://127.0.0.1:1")
    there = {"RUN_ID": "mine", "KUBECONFIG": closed}
    done = cluster.samestep("launch", *cluster.words("k8s"), **there)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    checked = cluster.samestep("launch", "--check", *cluster.words("k8s"), **there)
    assert checked.returncode == 0
    assert "no cluster was checked" in checked.stdout


def test_a_wrong_login_is_an_error_of_check_too(cluster: Cluster) -> None:
    of_nobody = cluster.kubeconfig_of("of-nobody")
    wrong_context = cluster.folder / "wrong-context"
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    wrong_context.write_text(yaml.safe_dump(config | {"current-context": "elsewhere"}))
    for place, said in ((of_nobody, "not accept your login"), (wrong_context, "elsewhere")):
        for flags in (["--check"], []):
            there = {"RUN_ID": "mine", "KUBECONFIG": str(place)}
            done = cluster.samestep("launch", *flags, *cluster.words("k8s"), **there)
            assert done.returncode == 1, done.stdout
            assert said in done.stderr
            assert len(done.stderr.splitlines()) == 1
