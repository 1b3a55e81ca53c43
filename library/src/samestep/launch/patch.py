"""Merge ``cluster.pod_patch`` and ``cluster.job_patch`` into the rendered objects.

The rules are those of Kubernetes' strategic merge patch: mappings are merged, ``null`` removes a
key, and items of some lists are found by a key, such as containers by their name, and merged too.
Every other list is replaced. The cluster judges the result.

Not ``kubectl patch --local``: it knows no such keys for the kinds of operators, and ``--render``
needs no kubectl.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.nodes import walk
from samestep.launch import kubectl
from samestep.launch.render import Manifest

MERGE_KEYS = {  # lists in which items are found by a key
    **dict.fromkeys(
        (
            *("containers", "initContainers", "env", "volumes", "imagePullSecrets"),
            *("resourceClaims", "replicatedJobs"),
        ),
        "name",
    ),
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
}


def apply(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Patch the pods that train, and the object that ends when the run ends.

    Raises:
        ConfigError: if a patch changes what says whose an object is.
    """
    # Other clusters have manifests of their own kinds.
    if "pod_patch" not in cfg.cluster:
        return list(manifests)
    pod_patch = read_patch(cfg, "pod_patch")
    job_patch = read_patch(cfg, "job_patch")
    patched = copy.deepcopy(list(manifests))
    for index, manifest in enumerate(patched):
        for template in find_pod_templates(cfg, manifest):
            labels = kubectl.read_identity(template)
            # In place: the manifest has it somewhere within.
            template |= merge(template, pod_patch)
            reject_change("pod_patch", labels, kubectl.read_identity(template))
        if manifest["kind"] in kubectl.RUNS:
            patched[index] = merge(manifest, job_patch)
            reject_change("job_patch", find_place(manifest), find_place(patched[index]))
    return patched


def read_patch(cfg: DictConfig, key: str) -> dict[str, Any]:
    """Read a patch from the configuration; empty if there is none."""
    patch = cfg.cluster[key]
    if patch is None:
        return {}
    plain: dict[str, Any] = OmegaConf.to_container(patch, resolve=True)  # type: ignore[assignment]
    return plain


def find_pod_templates(cfg: DictConfig, tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the templates of pods that train within ``tree``, as opposed to that of etcd."""
    # Each kind of object has them at another place, and a JobSet in a list.
    for _, node in walk(tree):
        if not isinstance(node, dict) or not isinstance(node.get("spec"), dict):
            continue
        if "containers" in node["spec"] and kubectl.is_training_pod(cfg, node):
            yield node


def find_place(manifest: Manifest) -> dict[str, Any]:
    """What of an object no patch may change."""
    metadata = manifest["metadata"]
    place = {key: metadata.get(key) for key in ("name", "namespace")}
    return place | kubectl.read_identity(manifest)


def reject_change(key: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise a ConfigError if a patch has changed what must stay."""
    for name, value in before.items():
        if after.get(name) != value:
            raise ConfigError(
                f"cluster.{key}: must not change {name}, by which the run is found; leave it out"
            )


def merge(base: Any, patch: Any, list_name: str = "") -> Any:
    """Merge ``patch`` into a copy of ``base``.

    Args:
        base: part of an object.
        patch: what to change in it.
        list_name: the key of ``base``, if it is a list.
    """
    if isinstance(base, dict) and isinstance(patch, dict):
        return merge_mapping(base, patch)
    if isinstance(base, list) and isinstance(patch, list) and list_name in MERGE_KEYS:
        return merge_list(base, patch, MERGE_KEYS[list_name])
    return copy.deepcopy(patch)


def merge_mapping(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Merge each key of ``patch`` into a copy of ``base``; ``null`` removes a key."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
            continue
        known = base.get(key)
        if known is None and isinstance(value, dict):
            # Of a new mapping, too, the keys with null are left out.
            known = {}
        merged[key] = merge(known, value, key)
    return merged


def merge_list(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    """Merge the items of ``patch`` into those of ``base`` with the same ``key``; add the others."""
    merged = list(base)
    for item in patch:
        known = [found.get(key) for found in merged]
        if item.get(key) in known:
            index = known.index(item[key])
            merged[index] = merge(merged[index], item)
        else:
            merged.append(copy.deepcopy(item))
    return merged
