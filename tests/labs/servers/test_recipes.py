"""The recipes of docs/clusters/recipes.md: the real servers accept each, and a pod of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.launch import patch, render
from tests.labs.servers.conftest import Cluster, own_namespace, until
from tests.samestep.launch.test_patch import BLOCKS, configured

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def open_to_all(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A namespace that allows privileged pods, with the objects that recipes name."""
    with own_namespace(kubeconfig, tmp_path_factory.mktemp("recipes")) as here:
        labels = {"pod-security.kubernetes.io/enforce": "privileged"}
        here.apply(
            {"apiVersion": "v1", "kind": "Namespace"}
            | {"metadata": {"name": here.namespace, "labels": labels}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}},
            {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
            | {"metadata": {"name": "nvidia"}},
        )
        until(lambda: here.get("serviceaccounts", "trainer"))
        yield here


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_servers_accept_a_recipe(open_to_all: Cluster, number: int) -> None:
    block = BLOCKS[number]
    if "apiVersion" in block:
        assert open_to_all.dry_run(block) == ""
        return
    cfg = configured(block, "trainer.num_nodes=1")
    manifests = patch.apply(cfg, render.render(cfg, []))
    assert open_to_all.dry_run(*manifests) == ""
    template = next(patch.find_pod_templates(cfg, manifests[-1]))
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
    pod["metadata"] = template["metadata"] | {"name": "x"}
    assert open_to_all.dry_run(pod) == ""
