"""Secrets that would be there for all to read: in a configuration, or in what it is rendered to."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.ranks import secrets

Node = dict[str, Any]

SECRET_NAME = re.compile(
    r"(^|_)(api_?)?(key|token|secret|passw(or)?d|passphrase|credentials?)(_|$)", re.IGNORECASE
)
HARMLESS = re.compile(r"/|\$\{|$|null$|true$|false$")  # a path, an interpolation, nothing
ASSIGNED = re.compile(r"(?:--[\w-]+=)?[-+~]*([\w.-]+)=(.*)", re.DOTALL)  # NAME=VALUE
SECRET = re.compile(  # what W&B, GitHub, AWS and others make; passwords in addresses
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{35}"
    r"|\bwandb_v\d_\w{20,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/\s:@]+:[^/\s:@]+@"
)
SECRET_RULE = (  # never with the value
    "is a secret that all could read; put it into the Secret that cluster.secret names, whose keys "
    "become variables of the pods"
)


def of_config(cfg: DictConfig) -> Iterator[str]:
    """The keys of ``cfg`` that hold one, as it was written."""
    cluster = ("cluster.secret", "cluster.tolerations")  # names, not values
    for path, node in walk(OmegaConf.to_container(cfg)):
        if not path.startswith(cluster) and any(is_secret(*pair) for pair in named(path, node)):
            yield f"{path}: {SECRET_RULE}"


def of_document(document: Node) -> Iterator[str]:
    """Secrets in the clear, by their place."""
    if document.get("kind") == "Secret" and {"data", "stringData"} & document.keys():
        yield "data: a Secret is made once, by kubectl create secret; leave it out of the manifests"
    last = ""
    for path, node in walk(document):
        pairs = [pair for pair in named("", node) if not pair[0].startswith("cluster.")]
        if any(is_secret(*pair) for pair in pairs) and not (last and path.startswith(last)):
            last = path
            yield f"{path}: {SECRET_RULE}"


def named(path: str, node: Any) -> Iterator[tuple[str, object]]:
    """What ``node`` may be: a value, a variable of a container, ``NAME=VALUE``."""
    yield path.rpartition(".")[2], node
    if isinstance(node, dict) and {"name", "value"} <= node.keys():
        yield str(node["name"]), node["value"]
    if isinstance(node, str) and (match := ASSIGNED.fullmatch(node)):
        yield match[1] if match[1].startswith("cluster.") else match[1].rpartition(".")[2], match[2]


def is_secret(name: str, value: object) -> bool:
    """Whether nobody should see the value of ``name``."""
    if not isinstance(value, str):
        return False
    named = SECRET_NAME.search(name) and not HARMLESS.match(value)
    return bool(named or SECRET.search(value)) or secrets.redact(value) != value


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything within ``node`` and itself, with its path."""
    yield path, node
    parts: Sequence[tuple[str, Any]] = []
    if isinstance(node, dict):
        parts = [(f"{path}.{key}".lstrip("."), value) for key, value in node.items()]
    elif isinstance(node, list):
        parts = [(f"{path}[{number}]", value) for number, value in enumerate(node)]
    for place, value in parts:
        yield from walk(value, place)
