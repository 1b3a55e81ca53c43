"""What ``cluster.pod_patch`` and ``cluster.job_patch`` change, and what no patch may change."""

import re
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch import patch, render
from samestep.launch.check import faults
from tests import launching
from tests.conftest import ROOT

Object = dict[str, Any]
PAGE = (ROOT / "docs/clusters/recipes.md").read_text()
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
RECIPES = [block for block in BLOCKS if "defaults" in block]
"""Files of configs/cluster; tests/labs/servers/test_recipes.py lets a real server judge them."""


def configured(recipe: Object, *words: str) -> DictConfig:
    """The configuration of a run with a recipe as its cluster."""
    recipe = dict(recipe)
    base, own = recipe.pop("defaults")
    assert own == "_self_"
    cfg = check([f"cluster={base}", *words])
    cfg.run_id = "mine"
    assert recipe.keys() <= cfg.cluster.keys()
    cfg.cluster = OmegaConf.merge(cfg.cluster, recipe)
    return cfg


def patched(recipe: Object, *words: str) -> list[Object]:
    cfg = configured(recipe, *words)
    return patch.apply(cfg, render.render(cfg, words))


def pod_of(manifests: list[Object]) -> Object:
    (template,) = patch.find_pod_templates(check(["cluster=k8s"]), manifests[-1])
    return template


def test_mappings_merge_null_removes_and_lists_are_merged_by_their_keys():
    base = {"a": {"b": 1, "c": 2}, "env": [{"name": "A", "value": "1"}], "args": ["x", "y"]}
    merged = patch.merge(base, {
        "a": {"b": None, "d": {"e": 3, "f": None}},
        "env": [{"name": "A", "value": "2"}, {"name": "B"}],
        "args": ["z"],
    })  # fmt: skip
    assert merged == {
        "a": {"c": 2, "d": {"e": 3}},
        "env": [{"name": "A", "value": "2"}, {"name": "B"}],
        "args": ["z"],
    }
    assert base["a"] == {"b": 1, "c": 2}


def test_a_container_keeps_what_its_patch_does_not_name():
    limits = {"nvidia.com/gpu": None, "amd.com/gpu": 2}
    mount = {"name": "tmp", "mountPath": "/scratch"}
    containers = [{"name": "trainer", "resources": {"limits": limits}, "volumeMounts": [mount]}]
    recipe = {"defaults": ["k8s", "_self_"], "pod_patch": {"spec": {"containers": containers}}}
    (container,) = pod_of(patched(recipe, "trainer.num_nodes=2"))["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "16Gi", "amd.com/gpu": 2}
    mounts = [item["mountPath"] for item in container["volumeMounts"]]
    assert mounts == ["/dev/shm", "/tmp", "/workspace/runs", "/workspace/data", "/scratch"]
    assert "--nnodes=2" in container["args"]


@pytest.mark.parametrize("target", ["k8s", "jobset", "kubeflow", "pytorchjob", "elastic"])
def test_every_target_takes_both_patches(target):
    recipe = {
        "defaults": [target, "_self_"],
        "pod_patch": {"spec": {"schedulerName": "volcano"}},
        "job_patch": {"metadata": {"labels": {"team": "vision"}}},
    }
    manifests = patched(recipe)
    owner = manifests[-1]
    assert owner["metadata"]["labels"]["team"] == "vision"
    pods = patch.find_pod_templates(configured(recipe), manifests)
    assert [pod["spec"]["schedulerName"] for pod in pods] == ["volcano"]
    assert yaml.safe_dump(manifests).count("schedulerName") == 1  # not etcd's


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("pod_patch", {"metadata": {"labels": {"samestep/run": "other"}}}),
        ("pod_patch", {"metadata": {"labels": None}}),
        ("job_patch", {"metadata": {"name": "other"}}),
        ("job_patch", {"metadata": {"namespace": "other"}}),
    ],
)
def test_no_patch_changes_whose_an_object_is(key, change):
    with pytest.raises(ConfigError, match=rf"cluster.{key}: must not change"):
        patched({"defaults": ["k8s", "_self_"], key: change})


def test_a_patch_is_typed_rendered_and_searched_for_secrets(tmp_path):
    words = ["cluster=k8s", "cluster.pod_patch={spec: {runtimeClassName: nvidia}}"]
    rendered = launching.launch(*words, "--render", cwd=tmp_path).stdout
    assert "runtimeClassName: nvidia\n" in rendered
    wrong = launching.launch("cluster=k8s", "cluster.pod_patch=nvidia", "--render", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "a mapping" in wrong.stderr
    variable = {"name": "DB_PASSWORD", "value": "hunter2secret"}
    containers = [{"name": "trainer", "env": [variable]}]
    recipe = {"defaults": ["k8s", "_self_"], "pod_patch": {"spec": {"containers": containers}}}
    cfg = configured(recipe)
    assert any("is a secret" in fault for fault in faults(cfg, patched(recipe)))


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_a_recipe_of_the_page_changes_what_it_names(number):
    recipe = RECIPES[number]
    cfg = configured(recipe)
    before = render.render(cfg, [])
    after = patch.apply(cfg, before)
    assert after != before
    assert [item["kind"] for item in after] == [item["kind"] for item in before]
    assert list(faults(cfg, after)) == []
