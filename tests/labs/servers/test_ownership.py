"""Whose an object is: a run touches only its own, and is launched as a whole or not at all."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.conftest import ROOT, environment
from tests.labs.servers.conftest import WAIT_S, Cluster, Object, documents_of, until

pytestmark = pytest.mark.servers
INSTANCE = {"app.kubernetes.io/instance": "web"}
PORTS = {"ports": [{"port": 80}], "selector": INSTANCE}
SAFE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def named(kind: str, name: str, spec: Object, api: str = "v1") -> Object:
    meta = {"name": name, "labels": INSTANCE}
    return {"apiVersion": api, "kind": kind, "metadata": meta, "spec": spec}


POLICY = named(
    "NetworkPolicy", "web", {"podSelector": {"matchLabels": INSTANCE}}, "networking.k8s.io/v1"
)


DEPLOYMENT = {
    "replicas": 0,
    "selector": {"matchLabels": INSTANCE},
    "template": {
        "metadata": {"labels": INSTANCE},
        "spec": {"containers": [{"name": "web", "image": "x:1", "securityContext": SAFE}]},
    },
}


def uids(cluster: Cluster) -> dict[str, str]:
    """The ids of all objects that a run may consist of, by their kind and name."""
    kinds = ("services", "networkpolicies", "pods", "deployments", "jobs", "jobsets")
    return {
        f"{kind}/{item['metadata']['name']}": item["metadata"]["uid"]
        for kind in kinds
        for item in cluster.get(kind)
    }


def test_what_strangers_have_under_the_name_of_a_run_stays(cluster: Cluster) -> None:
    cluster.apply(named("Service", "web", PORTS), named("Service", "web-etcd", PORTS), POLICY)
    cluster.apply(named("Deployment", "web-etcd", DEPLOYMENT, "apps/v1"))
    before = uids(cluster)
    for target in ("k8s", "elastic"):
        words = cluster.words(target)
        for command, first in (("cancel", ["web"]), ("launch", []), ("launch", ["--check"])):
            done = cluster.samestep(command, *first, *words, RUN_ID="web")
            assert done.returncode == 2, done.stdout
            assert "which is of no run of samestep" in done.stderr
            assert len(done.stderr.splitlines()) == 1
        assert cluster.samestep("status", "web", *words).returncode == 1
    assert uids(cluster) == before


def test_pods_of_a_release_with_the_name_of_a_run_are_not_touched(cluster: Cluster) -> None:
    container = {"name": "web", "image": "x:1", "securityContext": SAFE}
    cluster.apply(named("Pod", "web-0", {"containers": [container]}))
    until(lambda: cluster.get("pods", "web-0")["status"].get("phase") == "Running")
    assert cluster.launch("k8s", "web").returncode == 0
    until(lambda: len(cluster.get("pods", selector="samestep/run=web")) == 2)
    policy = cluster.get("networkpolicies", "web")["spec"]
    for selector in (policy["podSelector"], policy["ingress"][0]["from"][0]["podSelector"]):
        assert not selector["matchLabels"].items() <= INSTANCE.items()
    assert "web-0 " not in cluster.samestep("status", "web").stdout
    cancelled = cluster.samestep("cancel", "web")
    assert cancelled.returncode == 0, cancelled.stderr
    until(lambda: cluster.left() == ["pods/web-0"])


def test_a_name_is_one_run_whatever_its_target(cluster: Cluster) -> None:
    assert cluster.launch("k8s", "mine").returncode == 0
    cluster.until_training("mine")
    before = uids(cluster)
    for target in ("jobset", "elastic", "kubeflow"):
        done = cluster.launch(target, "mine")
        assert done.returncode == 2, done.stdout
        assert "mine: is a run with cluster=k8s, launched by " in done.stderr
        assert "samestep cancel mine cluster=k8s" in done.stderr
    assert uids(cluster) == before


@pytest.mark.parametrize("target", ["k8s", "kubeflow"])
def test_of_two_launches_at_once_one_is_told_whose_run_it_is(cluster: Cluster, target: str) -> None:
    processes = []
    for number in (1, 2):
        folder = cluster.folder / f"of-{number}"
        folder.mkdir()
        words = [*cluster.words(target), f"cluster.image=x:{number}"]
        variables = {"KUBECONFIG": str(cluster.kubeconfig), "SAMESTEP_PROJECT": str(ROOT)}
        processes.append(
            subprocess.Popen(
                [sys.executable, ROOT / "tests/samestep_here.py", "launch", *words],
                cwd=folder, env=environment(**variables, RUN_ID="mine"), text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    said = [process.communicate(timeout=WAIT_S)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 1], said
    lost = said[codes.index(1)]
    assert "launched" in lost
    assert "since 20" in lost
    assert "choose another RUN_ID" in lost
    images = {container["image"] for container in find_containers(cluster.until_training("mine"))}
    assert images == {f"x:{codes.index(0) + 1}"}
    if target == "kubeflow":
        runtime = cluster.get("trainingruntimes", "mine")
        assert images == {container["image"] for container in find_containers(runtime)}


def find_containers(tree: object) -> list[Object]:
    """All containers within ``tree``."""
    if isinstance(tree, dict):
        own = tree.get("containers", [])
        return [*own, *(found for node in tree.values() for found in find_containers(node))]
    if isinstance(tree, list):
        return [found for node in tree for found in find_containers(node)]
    return []


def check_rejected(cluster: Cluster, words: Sequence[str], said: str, **variables: str) -> None:
    """Check that both ``--check`` and ``launch`` reject a run, and that nothing of it is left."""
    for flags in (["--check"], []):
        done = cluster.samestep("launch", *flags, *words, RUN_ID="mine", **variables)
        assert done.returncode == 2, (said, done.stdout)
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not cluster.left()
    assert not (cluster.folder / "runs").exists()


def test_what_the_cluster_would_reject_is_said_before_anything_exists(cluster: Cluster) -> None:
    for target, word, said in (
        ("k8s", "cluster.namespace=nowhere", "there is no namespace nowhere"),
        ("elastic", "cluster.manifest=[network,etcd,elasticjob]", "does not know ElasticJob"),
        ("k8s", "cluster.volume=other", "other: there is no such claim"),
        ("k8s", "cluster.node_selector={a b: c}", "nodeSelector"),
        ("k8s", "cluster.priority_class=urgent", "there is no PriorityClass urgent"),
        ("k8s", "cluster.pull_secret=login", "login: there is no such Secret"),
        ("k8s", "cluster.queue=nowhere", "nowhere: "),
    ):
        check_rejected(cluster, [*cluster.words(target), word], said)
    good = cluster.samestep("launch", "--check", *cluster.words("k8s"), RUN_ID="mine")
    assert (good.returncode, good.stderr) == (0, "")
    assert "the cluster would accept it" in good.stdout
    assert not cluster.left()


def test_the_limits_of_the_namespace_are_asked_before_anything_exists(cluster: Cluster) -> None:
    limit = {"type": "Container", "max": {"memory": "32Mi"}}
    cluster.apply(
        {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"},
         "spec": {"limits": [limit]}}
    )  # fmt: skip
    until(lambda: "maximum memory" in cluster.dry_run(pod_of(cluster)))
    check_rejected(cluster, cluster.words("k8s"), "maximum memory usage per Container is 32Mi")
    cluster.delete("limitranges", "small")
    quota = {"kind": "ResourceQuota", "spec": {"hard": {"requests.memory": "32Mi"}}}
    cluster.apply({"apiVersion": "v1", "metadata": {"name": "small"}} | quota)
    until(lambda: "exceeded quota" in cluster.dry_run(pod_of(cluster)))
    check_rejected(cluster, cluster.words("k8s"), "the namespace's quota small is used up")


def test_a_quota_that_a_run_uses_up_rejects_another_run(cluster: Cluster) -> None:
    words = cluster.words("k8s")
    limit_namespace(cluster, {"requests.memory": "128Mi", "pods": "2"})
    for _ in range(2):
        # The second one finds the quota used up, by the run itself.
        done = cluster.launch("k8s", "mine")
        assert done.returncode == 0, done.stderr
        cluster.until_training("mine")
    checked = cluster.samestep("launch", "--check", *words, RUN_ID="mine")
    assert checked.returncode == 0, checked.stderr
    other = cluster.launch("k8s", "other")
    assert other.returncode == 2
    assert "the namespace's quota small is used up" in other.stderr


def limit_namespace(cluster: Cluster, limit: dict[str, str]) -> None:
    """Set the quota of the namespace, and wait until the server has counted what is there."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    cluster.apply(quota | {"spec": {"hard": limit}})
    until(lambda: cluster.get("resourcequotas", "small").get("status", {}).get("hard") == limit)


def pod_of(cluster: Cluster) -> Object:
    """A pod of a run, as its controller would create it."""
    template = documents_of(cluster, "k8s")[-1]["spec"]["template"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}} | {
        "spec": template["spec"]
    }


def test_a_user_who_may_create_only_a_part_creates_nothing(cluster: Cluster) -> None:
    cluster.allow_guest(
        {"apiGroups": ["", "batch"], "verbs": ["create"], "resources": ["jobs", "services"]},
        {"apiGroups": ["", "batch", "networking.k8s.io"], "verbs": ["get", "list"],
         "resources": ["jobs", "services", "networkpolicies", "persistentvolumeclaims"]},
    )  # fmt: skip
    guest = cluster.kubeconfig_of("guest")
    said = "guest may not create networkpolicies here"
    check_rejected(cluster, cluster.words("k8s"), said, KUBECONFIG=guest)
    check_rejected(cluster, cluster.words("jobset"), "guest may not get", KUBECONFIG=guest)


@pytest.fixture
def rejects_services(cluster: Cluster) -> Iterator[None]:
    """The namespace rejects every Service, although a dry run accepts it."""
    name = cluster.namespace
    kinds = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["services"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": name}}
    api, meta = "admissionregistration.k8s.io/v1", {"name": name}
    policy = {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": meta}
    policy["spec"] = {
        "matchConstraints": {"resourceRules": [kinds | {"operations": ["CREATE"]}]},
        "validations": [{"expression": "request.dryRun", "message": "no more Services"}],
    }
    binding = policy | {"kind": "ValidatingAdmissionPolicyBinding"}
    binding["spec"] = {"policyName": name, "validationActions": ["Deny"]}
    binding["spec"]["matchResources"] = {"namespaceSelector": here}
    cluster.apply(policy, binding)

    def is_rejected() -> bool:
        answer = cluster.call("POST", cluster.path_of("services"), named("Service", "try", PORTS))
        if answer.ok:
            cluster.delete("services", "try")
        return not answer.ok

    until(is_rejected)
    yield
    cluster.delete("validatingadmissionpolicybindings", name)
    cluster.delete("validatingadmissionpolicies", name)


@pytest.mark.usefixtures("rejects_services")
@pytest.mark.parametrize("target", ["k8s", "elastic"])
def test_what_was_made_before_an_error_is_taken_back(cluster: Cluster, target: str) -> None:
    done = cluster.launch(target, "mine")
    assert done.returncode == 1, done.stdout
    assert "no more Services" in done.stderr
    until(lambda: not cluster.left())


LOSES_THE_SERVER = """#!/bin/sh
{kubectl} "$@"; code=$?
case " $* " in
*dry-run*) ;;
*" create "*) cp {lost} "$KUBECONFIG";;
esac
exit $code
"""
"""A kubectl whose server cannot be reached once the first object, the Job, was created."""


def test_a_run_whose_launch_has_lost_the_server_is_named_and_found(cluster: Cluster) -> None:
    place = cluster.kubeconfig_of()
    lost = cluster.kubeconfig_of(server="https://127.0.0.1:1")
    wrapper = cluster.folder / "bin/kubectl"
    wrapper.parent.mkdir()
    wrapper.write_text(LOSES_THE_SERVER.format(kubectl=shutil.which("kubectl"), lost=lost))
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{os.environ['PATH']}"
    words = cluster.words("k8s")
    done = cluster.samestep("launch", *words, RUN_ID="mine", KUBECONFIG=place, PATH=path)
    assert done.returncode == 1, done.stdout
    assert "the cluster does not answer" in done.stderr
    assert "mine: may have left NetworkPolicy mine, Service mine, Job mine in" in done.stderr
    cluster.until_training("mine")
    assert "Job mine: runs" in cluster.samestep("status", "mine").stdout
    assert cluster.samestep("cancel", "mine").returncode == 0
    until(lambda: not cluster.left())
