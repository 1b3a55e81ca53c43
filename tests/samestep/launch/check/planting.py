"""Plant a mistake into the documents of a target, and list what the checks find."""

import re
from copy import deepcopy
from functools import cache

from omegaconf import DictConfig

from samestep.hydra.compose import check as compose
from samestep.launch import check, render
from samestep.launch.check.api_rules import check_api_rules
from samestep.launch.check.manifests import check_made_objects

TWO_BY_TWO = ["trainer.num_nodes=2", "trainer.devices=2"]
TARGETS = {
    "k8s": ["cluster=k8s", *TWO_BY_TWO],
    "jobset": ["cluster=jobset", *TWO_BY_TWO],
    "pytorchjob": ["cluster=pytorchjob", *TWO_BY_TWO],
    "kubeflow": ["cluster=kubeflow", *TWO_BY_TWO],
    "elastic": ["cluster=elastic", "trainer.devices=2"],
    "elasticjob": ["cluster=elasticjob", "trainer.devices=2"],
}
POD = "spec.template.spec"  # of a Job
CONTAINER = f"{POD}.containers[0]"


@cache
def compose_once(*overrides: str) -> DictConfig:
    return compose(list(overrides))


@cache
def render_once(*overrides: str, run_id: str):
    cfg = compose_once(*overrides).copy()
    cfg.run_id = run_id
    return cfg, render.render(cfg, overrides)


def composed(target: str = "k8s", *more: str, run_id: str = "mine"):
    """The configuration of a target and its documents, which a test may change."""
    return deepcopy(render_once(*TARGETS[target], *more, run_id=run_id))


def found(target: str = "k8s", *more: str, run_id: str = "mine", **planted: object) -> list[str]:
    """The faults of a target after each value is put at its place, ``Kind:path``."""
    cfg, documents = composed(target, *more, run_id=run_id)
    for place, value in planted.items():
        plant(documents, place, value)
    return list(check.faults(cfg, documents))


def refused(target: str = "k8s", **planted: object) -> list[str]:
    """What servers and webhooks refuse in code after each value is put at its place."""
    _, documents = composed(target)
    for place, value in planted.items():
        plant(documents, place, value)
    faults = [fault for document in documents for fault in check_api_rules(document)]
    return [*faults, *check_made_objects(documents)]


def plant(documents, place: str, value: object) -> None:
    """Set the value at ``Kind:path``; None removes what is there."""
    kind, _, path = place.partition(":")
    node = next(document for document in documents if document["kind"] == kind)
    *parents, last = split_path(path)
    for part in parents:
        if isinstance(node, dict) and part not in node:
            node[part] = {}
        node = node[part]
    if value is None:
        del node[last]
    elif isinstance(node, list) and last == len(node):
        node.append(value)
    else:
        node[last] = value


def split_path(path: str) -> list[str | int]:
    """``a.b[0].[c.d/e]`` as keys and indices."""
    parts = re.findall(r"\[([^\]]+)\]|([^.\[\]]+)", path)
    return [int(a) if a.isdigit() else a or b for a, b in parts]
