"""Secrets in plain text: everyone who may read a manifest could read them."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.launch.check.documents import walk
from samestep.launch.render import Document
from samestep.ranks.secrets import is_secret_name, looks_secret

RULE = (  # a message never shows the value
    "is a secret that everyone could read; put it into the Secret that cluster.secret names: its "
    "keys become variables of the pods"
)
HARMLESS = re.compile(r"/|\$\{|$|null$|true$|false$")  # a path, an interpolation, no value
ASSIGNMENT = re.compile(r"(?:--[\w-]+=)?[-+~]*([\w.-]+)=(.*)", re.DOTALL)  # NAME=VALUE
NAMES_ONLY = ("cluster.secret", "cluster.pull_secret")  # they, and cluster.secrets, hold names


def check_secrets_of_configuration(cfg: DictConfig) -> Iterator[str]:
    """Yield the keys of ``cfg`` whose values, before interpolation, are secrets."""
    for path, node in walk(OmegaConf.to_container(cfg)):
        if path.startswith(NAMES_ONLY):
            continue
        name = path.rpartition(".")[2]
        if is_secret(name, node) or holds_secret(node):
            yield f"{path}: {RULE}"


def check_secrets(document: Document) -> Iterator[str]:
    """Yield the places in ``document`` where secrets stand in plain text."""
    if document.get("kind") == "Secret" and {"data", "stringData"} & document.keys():
        yield "data: a Secret is made once, by kubectl create secret; leave it out of the manifests"
    reported: tuple[str, ...] = ()
    for path, node in walk(document):
        if path.startswith(reported):
            continue
        if is_secret("", node) or holds_secret(node):
            # The value of a variable is not reported again below the variable.
            reported = (f"{path}.", f"{path}[")
            yield f"{path}: {RULE}"


def holds_secret(node: Any) -> bool:
    """Whether ``node`` is a variable of a container, or NAME=VALUE, with a secret as its value."""
    if isinstance(node, dict) and {"name", "value"} <= node.keys():
        return is_secret(str(node["name"]), node["value"])
    match = ASSIGNMENT.fullmatch(node) if isinstance(node, str) else None
    if match is None:
        return False
    key, value = match.groups()
    if key.startswith("cluster."):
        # cluster.secret is only a name; check_secrets_of_configuration judges the other keys.
        return False
    return is_secret(key.rpartition(".")[2], value)


def is_secret(name: str, value: object) -> bool:
    """Whether ``value`` must stay secret, by its own look or because ``name`` says so."""
    if not isinstance(value, str):
        return False
    is_named_so = is_secret_name(name) and not HARMLESS.match(value)
    return is_named_so or looks_secret(value)
