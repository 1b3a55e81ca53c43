"""Mistakes in manifests, found before a cluster sees them: schemas, security, and our own rules.

Each is one line: the value, the rule, the remedy. Imports no torch and needs no network.
"""

import json
import lzma
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from jsonschema import Draft7Validator, ValidationError
from omegaconf import DictConfig

from samestep.config.schema import nearest, show
from samestep.errors import ConfigError
from samestep.launch import leaks, rules, security
from samestep.launch.schemas import SCHEMAS

Node = dict[str, Any]

EXAMPLE = "registry.example.com/"
TYPES = {
    "object": "keys and values",
    "array": "a list",
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}


def refuse(faults: Iterable[str]) -> None:
    """Raise a ConfigError with these lines, if there are any."""
    if lines := list(dict.fromkeys(faults)):
        raise ConfigError("\n".join(lines))


def faults(cfg: DictConfig, documents: Sequence[Node]) -> Iterator[str]:
    """What is wrong with ``cfg`` for a cluster, and with the documents that it was rendered to.

    The first say nothing of the others: the documents follow from ``cfg``. What is for no
    Kubernetes, such as a stack of Docker Swarm, is looked at less closely.
    """
    if of_cfg := [*of_run(cfg), *leaks.of_config(cfg)]:
        yield from of_cfg
        return
    for document in documents:
        found = list(leaks.of_document(document))
        if "commands" in cfg.cluster and "apiVersion" not in document:
            yield from (*found, *rules.of_jobs(document))
            continue
        if by_schema := list(of_schema(document)):
            found += by_schema  # the other rules rely on it
        else:
            found += rules.of_names(document)
            found += rules.of_numbers(cfg, document)
            found += rules.of_jobs(document)
            for path, pod in rules.pods(document):
                found += security.faults(pod, path)
                found += rules.of_pod(cfg, pod, path)
        name = (document.get("metadata") or {}).get("name", "")
        title = f"{document.get('kind', 'document')} {name}".strip()
        yield from (f"{title}: {fault}" for fault in found)


def of_run(cfg: DictConfig) -> Iterator[str]:
    """What is wrong with the run for any cluster; the manifests follow from this."""
    cluster, devices = cfg.cluster, cfg.trainer.devices
    if not rules.NAME.fullmatch(cfg.run_id):
        yield f"RUN_ID={cfg.run_id}: names things in the cluster, so it must be {rules.NAME_RULE}"
    namespace = cluster.namespace if "namespace" in cluster else None
    if namespace and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", namespace):
        rule = f"at most {rules.LONGEST} of a-z 0-9 -, the first and last not -"
        yield f"cluster.namespace={namespace}: must be {rule}"
    if devices == "auto":
        yield "trainer.devices=auto: a cluster must be told how many; say trainer.devices=N"
    elif "gpus" in cluster and type(cluster.gpus) is int and cluster.gpus != devices:
        yield (
            f"cluster.gpus={cluster.gpus}: each process has one, so it must be "
            f"trainer.devices={devices}; leave out cluster.gpus"
        )
    if cfg.trainer.accelerator == "gpu" and "gpus" in cluster and not cluster.gpus:
        yield (
            f"cluster.gpus={show(cluster.gpus)}: trainer.accelerator=gpu needs some; leave out "
            "cluster.gpus, or say trainer.accelerator=cpu"
        )
    if "grace_s" in cluster and cluster.grace_s <= cluster.shutdown_s:
        yield (
            f"cluster.grace_s={cluster.grace_s}: must be more than cluster.shutdown_s="
            f"{cluster.shutdown_s}, or pods are killed while they save; raise it"
        )
    if "image" in cluster and not rules.is_pinned(cluster.image):
        yield f"cluster.image={cluster.image}: {rules.IMAGE_RULE}"
    sizes = {key: rules.size(cluster[key]) for key in ("shm", "memory") if key in cluster}
    for key, value in sizes.items():
        if value is None:
            yield f"cluster.{key}={show(cluster[key])}: must be a size, such as 512Mi or 16Gi"
    known = [value for value in sizes.values() if value is not None]
    if len(known) == 2 and known[0] > known[1]:
        yield (
            f"cluster.shm={cluster.shm}: counts as memory, so it must be at most "
            f"cluster.memory={cluster.memory}"
        )
    if "volume" in cluster and cluster.volume is None and "commands" in cluster:
        yield "cluster.volume=null: must be the name of a claim; the pods keep nothing themselves"
    counts = {"max_nodes": "cluster.max_nodes", "devices_per_node": "cluster.devices_per_node"}
    for key, name in counts.items():
        if key in cluster and cfg.trainer.num_nodes != 1:
            yield f"trainer.num_nodes={cfg.trainer.num_nodes}: stays 1 here; {name} says how many"
    if "devices_per_node" in cluster and devices != 1:
        yield f"trainer.devices={devices}: stays 1 here; cluster.devices_per_node says how many"
    low, high = rules.nodes(cfg)
    if low > high:
        yield f"cluster.min_nodes={low}: must be at most cluster.max_nodes={high}"


def placeholder(cfg: DictConfig) -> Iterator[str]:
    """The fault of submitting without an image of one's own."""
    if "image" in cfg.cluster and cfg.cluster.image.startswith(EXAMPLE):
        yield (
            f"cluster.image={cfg.cluster.image}: is only an example; build and push an image as "
            "docs/clusters/image.md says, and name it"
        )


def of_schema(document: Node) -> Iterator[str]:
    """Fields, types and values that the API server does not know."""
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    if kind not in schemas()["kinds"]:
        near = nearest(kind, schemas()["kinds"])
        hint = f"did you mean {near}?" if near else f"those are {', '.join(schemas()['kinds'])}"
        yield f"{kind}: is none of the kinds whose schema is known; {hint}"
        return
    if not (document.get("metadata") or {}).get("name"):
        yield "metadata.name: is missing"
    for error in errors(kind, document):
        yield from _lines(error)


def errors(kind: str, document: Node) -> list[ValidationError]:
    """Where the document is not as the schema of its kind says."""
    schema = {**schemas()["kinds"][kind]["schema"], "definitions": schemas()["definitions"]}
    found = Draft7Validator(schema).iter_errors(document)
    return sorted(found, key=lambda error: [str(part) for part in error.absolute_path])


@cache
def schemas() -> Node:
    """The content of k8s/schemas.json.xz: ``kinds`` and the ``definitions`` they share."""
    content: Node = json.loads(lzma.decompress(SCHEMAS.read_bytes()))
    return content


def _lines(error: ValidationError) -> Iterator[str]:
    """The error in our words; a line for each field that does not exist."""
    parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path]
    path, value, rule = "".join(parts).lstrip("."), error.instance, error.validator_value
    if error.validator == "additionalProperties":
        known = error.schema["properties"]
        for key in sorted(value.keys() - known.keys()):
            near = nearest(key, known)
            hint = f"did you mean {near}?" if near else f"there is {', '.join(sorted(known))}"
            yield f"{path}.{key}: no such field; {hint}".lstrip(".")
    elif error.validator == "required":
        for key in sorted(set(rule) - value.keys()):
            yield f"{path}.{key}: is missing".lstrip(".")
    elif error.validator == "type":
        types = [rule] if isinstance(rule, str) else rule
        hint = ", such as 500m" if "pattern" in error.schema else ""
        yield f"{path}={json.dumps(value)}: must be {' or '.join(TYPES[t] for t in types)}{hint}"
    elif error.validator == "enum":
        near = nearest(str(value), [choice for choice in rule if choice])
        hint = f"; did you mean {near}?" if near else ""
        yield f"{path}={json.dumps(value)}: must be one of {', '.join(map(str, rule))}{hint}"
    elif error.validator == "pattern" and "KMGTPE" in rule:
        yield f"{path}={value}: must be a quantity, such as 2, 500m or 16Gi"
    else:
        yield f"{path}: {error.message}"
