"""Ask a Kubernetes cluster whether the quotas of a namespace suffice for all pods of a run."""

import copy
from collections.abc import Sequence

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import check, kubectl, patch
from samestep.launch.render import Manifest

ASKING = ("image", "resources", "securityContext")
"""What a container says about its size, and what each container must say to be accepted."""
COUNTS = ("pods", "count/pods")
"""Limits of a ResourceQuota for the number of pods."""


def judge(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Raise a QuotaError if a quota has no room for all pods together."""
    templates = find_templates(cfg, manifests)
    reject_too_many(cfg, len(templates))
    try:
        create_pod(cfg, merge_pods(templates))
    except kubectl.QuotaError as error:
        raise kubectl.QuotaError(f"{cfg.run_id}: {len(templates)} pods together: {error}") from None
    except RunError:
        # Such a pod may be wrong in other ways. The pods of the run are not: the cluster has
        # judged one of them.
        return


def create_pod(cfg: DictConfig, template: Manifest) -> None:
    """Have the cluster create a pod in a dry run."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{cfg.run_id}-check", **template.get("metadata", {})},
        "spec": template["spec"],
    }
    # Not `apply`, which also wants the right to read pods.
    options = ("--dry-run=server", "--validate=strict", "--filename=-")
    kubectl.call(cfg, "create", *options, manifests=[pod])


def find_templates(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Find the template of each pod that the run needs; of several pods it is the same one."""
    num_nodes, _ = check.find_numbers_of_nodes(cfg)
    owner = kubectl.find_owner(manifests)
    # The Job of --data has a single pod.
    if owner["kind"] == "Job" and "parallelism" not in owner["spec"]:
        num_nodes = 1
    found = []
    for template in patch.find_all_pod_templates(manifests):
        number = 1
        if kubectl.is_training_pod(cfg, template):
            number = num_nodes
        found += [template] * number
    return found


def merge_pods(templates: Sequence[Manifest]) -> Manifest:
    """Merge pods into one that asks for as much as all of them.

    A dry run uses nothing up: the cluster would judge each of several pods as if it were the only
    one. The requests of one pod it adds up, with its own rules for quantities and defaults.
    """
    merged = copy.deepcopy(templates[0])
    containers: list[Manifest] = []
    for template in templates:
        for container in template["spec"]["containers"]:
            # Without its ports: a pod may have each port of a node only once.
            kept = {key: container[key] for key in ASKING if key in container}
            containers.append(kept | {"name": f"container-{len(containers)}"})
    merged["spec"]["containers"] = containers
    return merged


def reject_too_many(cfg: DictConfig, num_pods: int) -> None:
    """Raise a QuotaError if a quota does not allow so many pods more."""
    try:
        quotas = kubectl.get(cfg, "resourcequotas").get("items", [])
    except RunError:
        # Not every user may read them.
        return
    for quota in quotas:
        # A quota with scopes counts only some of the pods.
        if {"scopes", "scopeSelector"} & quota["spec"].keys():
            continue
        status = quota.get("status", {})
        for key in COUNTS:
            hard = status.get("hard", {}).get(key, "")
            used = status.get("used", {}).get(key, "")
            is_counted = hard.isdigit() and used.isdigit()
            if is_counted and int(used) + num_pods > int(hard):
                raise kubectl.QuotaError(
                    f"{cfg.run_id}: {num_pods} pods together: the namespace's quota "
                    f"{quota['metadata']['name']} is used up: {key}={hard}, and {used} exist; wait "
                    "for other runs, or ask for fewer by trainer.num_nodes"
                )
