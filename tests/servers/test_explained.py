"""What the commands say of the causes that people meet, from the words of real servers."""

import re
from pathlib import Path

import pytest
import yaml

from tests.servers.conftest import Cluster, until

pytestmark = [pytest.mark.clusters, pytest.mark.servers]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cluster.namespace=nowhere"], "there is no namespace nowhere"),
     (["cluster=elasticjob", "~trainer.num_nodes"], "does not know ElasticJob"),
     (["cluster.volume=other"], "other: there is no such claim"),
     (["cluster.node_selector={a b: c}"], "nodeSelector"),
     (["cluster.memory=64Mi", "cluster.cpus=4x"], "quantities must match")],
)  # fmt: skip
def test_check_says_what_the_server_would_refuse(
    cluster: Cluster, words: list[str], said: str
) -> None:
    typed = [word for word in cluster.words("k8s") if word.partition("=")[0] not in words]
    done = cluster.samestep("launch", "--check", *typed, *words, RUN_ID="mine")
    assert done.returncode == 1, done.stdout
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not cluster.left()


def test_check_of_a_good_run_asks_the_server_and_leaves_nothing(cluster: Cluster) -> None:
    done = cluster.samestep("launch", "--check", *cluster.words("k8s"), RUN_ID="mine")
    assert done.returncode == 0, done.stderr
    assert "the cluster would accept it" in done.stdout
    assert not cluster.left()


def test_warnings_of_the_server_are_shown(cluster: Cluster) -> None:
    """A pod that the namespace will refuse is a Job that the server accepts, with a warning."""
    words = [*cluster.words("k8s"), "cluster.user=0"]
    checked = cluster.samestep("launch", "--check", *words, RUN_ID="mine")
    assert "would violate PodSecurity" in checked.stdout + checked.stderr
    submitted = cluster.samestep("launch", *words, RUN_ID="mine")
    assert submitted.returncode == 0
    assert "would violate PodSecurity" in submitted.stdout + submitted.stderr
    said = until(lambda: find(cluster, "are refused"))
    assert "restricted" in said
    assert "runAsUser=0" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [(["cluster.cpus=100"], "that much free cpu"),
     (["cluster.memory=900Gi"], "that much free memory"),
     (["cluster.node_selector={kind: h100}"], "has these labels|cluster.node_selector"),
     (["trainer.accelerator=gpu", "trainer.devices=9"], "nvidia.com/gpu")],
)  # fmt: skip
def test_status_says_why_no_pod_starts(cluster: Cluster, words: list[str], said: str) -> None:
    assert cluster.launch("k8s", "mine", *words).returncode == 0
    assert until(lambda: find(cluster, said))


def test_status_says_that_the_nodes_have_a_taint(cluster: Cluster) -> None:
    cluster.kubectl("taint", "nodes", "--all", f"test={cluster.namespace}:NoSchedule")
    try:
        assert cluster.launch("k8s", "mine").returncode == 0
        assert until(lambda: find(cluster, "cluster.tolerations"))
    finally:
        cluster.kubectl("taint", "nodes", "--all", "test-")


def test_status_says_that_the_quota_is_used_up(cluster: Cluster) -> None:
    quota = {"kind": "ResourceQuota", "spec": {"hard": {"pods": "1"}}}
    cluster.apply({"apiVersion": "v1", "metadata": {"name": "small"}} | quota)
    assert cluster.launch("k8s", "mine").returncode == 0
    assert "small" in until(lambda: find(cluster, "quota"))


def find(cluster: Cluster, said: str) -> str:
    """The line of ``samestep status`` that says it; nothing if none does yet."""
    done = cluster.samestep("status", "mine")
    lines = [line for line in done.stdout.splitlines() if re.search(said, line)]
    return lines[0] if lines else ""


def test_a_user_without_rights_is_told_so(cluster: Cluster, tmp_path: Path) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "guest"
    path = tmp_path / "guest"
    path.write_text(yaml.safe_dump(config))
    done = cluster.samestep("launch", *cluster.words("k8s"), RUN_ID="mine", KUBECONFIG=str(path))
    assert done.returncode == 1
    assert "guest may not" in done.stderr


def test_a_cluster_that_does_not_answer_is_said_to_be_one(cluster: Cluster, tmp_path: Path) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    path = tmp_path / "closed"
    path.write_text(yaml.safe_dump(config))
    there = {"RUN_ID": "mine", "KUBECONFIG": str(path)}
    done = cluster.samestep("launch", *cluster.words("k8s"), **there)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    checked = cluster.samestep("launch", "--check", *cluster.words("k8s"), **there)
    assert checked.returncode == 0
    assert "no cluster was asked" in checked.stdout
