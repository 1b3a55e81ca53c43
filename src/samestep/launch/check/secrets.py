"""Secrets in plain text: everyone who may read a manifest could read them."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.launch.check.documents import Node, walk
from samestep.ranks import secrets

RULE = (  # a message never shows the value
    "is a secret that everyone could read; put it into the Secret that cluster.secret names: its "
    "keys become variables of the pods"
)
SECRET_NAME = re.compile(
    r"(^|_)(api_?)?(key|token|secret|passw(or)?d|passphrase|credentials?)(_|$)", re.IGNORECASE
)
SECRET = re.compile(  # tokens of W&B, GitHub, AWS and others, and passwords in addresses
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|\bwandb_v\d_\w{20,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]+:[^/\s:@]+@"
)
HARMLESS = re.compile(r"/|\$\{|$|null$|true$|false$")  # a path, an interpolation, no value
ASSIGNMENT = re.compile(r"(?:--[\w-]+=)?[-+~]*([\w.-]+)=(.*)", re.DOTALL)  # NAME=VALUE
NAMES_ONLY = ("cluster.secret", "cluster.tolerations")  # keys that hold names, never secrets


def check_secrets_of_configuration(cfg: DictConfig) -> Iterator[str]:
    """Yield the keys of ``cfg`` whose values, before interpolation, are secrets."""
    for path, node in walk(OmegaConf.to_container(cfg)):
        if path.startswith(NAMES_ONLY):
            continue
        name = path.rpartition(".")[2]
        if is_secret(name, node) or holds_secret(node):
            yield f"{path}: {RULE}"


def check_secrets(document: Node) -> Iterator[str]:
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


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret."""
    return SECRET_NAME.search(name) is not None


def looks_secret(value: str) -> bool:
    """Whether ``value`` has the form of a known token, or one of this machine's secrets in it."""
    return SECRET.search(value) is not None or secrets.redact(value) != value
