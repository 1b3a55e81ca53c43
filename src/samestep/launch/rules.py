"""Our own rules for manifests: names, numbers that must agree, images."""

import math
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from samestep.launch.leaks import walk
from samestep.launch.schemas import QUANTITY
from samestep.launch.security import CONTAINERS

Node = dict[str, Any]

LONGEST = 63  # characters of a name in DNS
NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{LONGEST - 2}}}[a-z0-9])?")  # also that of a Service
NAME_RULE = f"at most {LONGEST} of a-z 0-9 -, the first a letter, the last not -"
VALUE = re.compile(rf"([A-Za-z0-9]([-\w.]{{0,{LONGEST - 2}}}[A-Za-z0-9])?)?")  # of a label
EXPONENTS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
UNITS = {unit: 10.0**exponent for unit, exponent in EXPONENTS.items()}
UNITS |= {f"{unit}i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")}
IMAGE_RULE = "may be another one tomorrow; name a tag other than latest, or a digest"
NUM_NODES = ("numNodes", "completions", "parallelism", "nnodes")
NUM_PROCESSES = ("nprocPerNode", "numProcPerNode", "nproc-per-node")


def of_names(document: Node) -> Iterator[str]:
    """Names and labels that the cluster, or the controller of the document, would refuse."""
    name = document["metadata"]["name"]
    longest = longest_name(document)
    if not NAME.fullmatch(name):
        yield f"metadata.name={name}: must be {NAME_RULE}; choose another RUN_ID"
    elif len(longest) > LONGEST:
        yield (
            f"metadata.name={name}: becomes {longest}, {len(longest)} characters of at most "
            f"{LONGEST}; choose a RUN_ID that is {len(longest) - LONGEST} shorter"
        )
    for path, node in walk(document):
        if path.endswith(("labels", "matchLabels")):
            for key, value in node.items():
                if not VALUE.fullmatch(value):
                    rule = f"at most {LONGEST} of A-Z a-z 0-9 - _ ., the first and last no sign"
                    yield f"{path}[{key}]={value}: must be {rule}"


def longest_name(document: Node) -> str:
    """The longest name that the document's controller gives to a pod or its Service."""
    name, spec, kind = str(document["metadata"]["name"]), document.get("spec", {}), document["kind"]
    names = [name]
    if kind == "Job" and spec.get("completionMode") == "Indexed":
        names = [f"{name}-{spec.get('completions', 1) - 1}"]
    elif kind == "JobSet":
        names = [
            f"{name}-{job['name']}-{job.get('replicas', 1) - 1}"
            f"-{job['template']['spec'].get('completions', 1) - 1}-abcde"
            for job in spec["replicatedJobs"]
        ]
    elif kind == "TrainJob":  # becomes a JobSet of the same name
        names = [f"{name}-node-0-{spec.get('trainer', {}).get('numNodes', 1) - 1}-abcde"]
    elif kind in ("PyTorchJob", "ElasticJob"):
        replicas = spec.get("pytorchReplicaSpecs") or spec.get("replicaSpecs") or {}
        counts = {role.lower(): node.get("replicas", 1) for role, node in replicas.items()}
        names = [f"{name}-{role}-{count - 1}" for role, count in counts.items()] or names
    return max(names, key=len)


def of_numbers(cfg: DictConfig, document: Node) -> Iterator[str]:
    """Numbers of nodes and processes that are not those of the run."""
    low, high = nodes(cfg)
    wanted = f"cluster.min_nodes={low} to cluster.max_nodes={high}"
    wanted = wanted if low < high else f"trainer.num_nodes={high}"
    for path, node in walk(document):
        if not isinstance(node, dict):
            continue
        found = [(f"{path}.{key}", key, value) for key, value in node.items()]
        found += [(f"{path}: --{key}", key, value) for key, value in options(node)]
        for place, key, value in found:
            if key in NUM_PROCESSES and str(value) != str(cfg.trainer.devices):
                yield f"{place}={value}: must be trainer.devices={cfg.trainer.devices}"
            elif key == "minReplicas" and value != low:
                yield f"{place}={value}: must be cluster.min_nodes={low}"
            elif key == "maxReplicas" and value != high:
                yield f"{place}={value}: must be cluster.max_nodes={high}"
            elif key in NUM_NODES and is_of_training(cfg, node):
                numbers = [int(number) for number in str(value).split(":")]
                if numbers[-1] != high or (key == "nnodes" and numbers[0] != low):
                    yield f"{place}={value}: must be {wanted}"
        if path.endswith("pytorchReplicaSpecs"):
            total = sum(role.get("replicas", 1) for role in node.values())
            if total != high:
                yield f"{path}: {total} replicas; must be {wanted}"


def of_pod(cfg: DictConfig, pod: Node, path: str) -> Iterator[str]:
    """What does not fit together in a pod, or in a template of one at ``path``."""
    spec, place = pod["spec"], f"{path}.spec".lstrip(".")
    volumes = spec.get("volumes", [])
    memory: list[float] = []
    for group in CONTAINERS:
        for number, container in enumerate(spec.get(group, ())):
            where = f"{place}.{group}[{number}]"
            resources = container.get("resources", {})
            limits = resources.get("limits", {})
            for key, value in resources.get("requests", {}).items():
                if key in limits and quantity(value) > quantity(limits[key]):
                    yield (
                        f"{where}.resources.requests.{key}={value}: must be at most the limit, "
                        f"{limits[key]}"
                    )
            for mount in container.get("volumeMounts", ()):
                if mount["name"] not in [volume["name"] for volume in volumes]:
                    yield f"{where}.volumeMounts: the pod has no volume {mount['name']}"
            if group == "containers":
                memory.append(quantity(limits["memory"]) if "memory" in limits else math.inf)
            if container["name"] == cfg.cluster.container:
                yield from of_trainer(cfg, container, where)
                saving = dict(options(container)).get("shutdown-timeout", cfg.cluster.shutdown_s)
                grace = spec.get("terminationGracePeriodSeconds", 30)
                if grace <= float(saving):
                    yield (
                        f"{place}.terminationGracePeriodSeconds={grace}: must be more than the "
                        f"{saving} seconds for saving; set cluster.grace_s above cluster.shutdown_s"
                    )
                if "memory" not in limits:  # the TrainJob has them
                    memory[-1] = quantity(cfg.cluster.memory)
    in_memory = [v["emptyDir"] for v in volumes if v.get("emptyDir", {}).get("medium") == "Memory"]
    used, limit = sum(quantity(v.get("sizeLimit", 0)) for v in in_memory), sum(memory)
    if used > limit:
        yield (
            f"{place}.volumes: {used / 2**30:g}Gi of them are memory, of which the pod may use "
            f"{limit / 2**30:g}Gi; set cluster.shm to at most cluster.memory"
        )


def of_trainer(cfg: DictConfig, container: Node, where: str) -> Iterator[str]:
    """What a container that trains must have."""
    for key, value in container.get("resources", {}).get("limits", {}).items():
        if key.endswith("/gpu") and quantity(value) != cfg.trainer.devices:
            yield (
                f"{where}.resources.limits.{key}={value}: each process has one GPU, so it must be "
                f"trainer.devices={cfg.trainer.devices}; leave out cluster.gpus"
            )


def of_jobs(document: Node) -> Iterator[str]:
    """Images that may change; policies of Jobs that their pods do not fit."""
    for path, node in walk(document):
        if not isinstance(node, dict):
            continue
        image = node.get("image")
        if isinstance(image, str) and not is_pinned(image):
            yield f"{path}.image={image}: {IMAGE_RULE}"
        if is_job(node):
            spec = node["template"]["spec"]
            if spec.get("restartPolicy") not in ("Never", "OnFailure"):
                yield f"{path}.template.spec.restartPolicy: must be Never or OnFailure in a Job"
        if "podFailurePolicy" in node:
            if spec.get("restartPolicy") != "Never":
                yield (
                    f"{path}.template.spec.restartPolicy={spec.get('restartPolicy')}: must be "
                    "Never beside a podFailurePolicy"
                )
            names = [container["name"] for container in spec["containers"]]
            for rule in node["podFailurePolicy"]["rules"]:
                name = rule.get("onExitCodes", {}).get("containerName")
                if name and name not in names:
                    yield f"{path}.podFailurePolicy: the pod has no container {name}"


def is_pinned(image: str) -> bool:
    """Whether the image's name always means the same image."""
    _, _, digest = image.partition("@sha256:")
    _, _, tag = image.rpartition("/")[2].partition(":")
    return len(digest) == 64 or ("@" not in image and tag not in ("", "latest"))


def is_job(node: Node) -> bool:
    """Whether ``node`` is the specification of a Job, not a change of one, as runtimePatches."""
    return "backoffLimit" in node and "template" in node


def is_of_training(cfg: DictConfig, node: Node) -> bool:
    """Whether ``node`` is not the specification of a Job that does something else."""
    containers = node.get("template", {}).get("spec", {}).get("containers", ())
    return not containers or cfg.cluster.container in [c["name"] for c in containers]


def nodes(cfg: DictConfig) -> tuple[int, int]:
    """The least and the greatest number of nodes of the run."""
    if "max_nodes" in cfg.cluster:
        return cfg.cluster.min_nodes, cfg.cluster.max_nodes
    return cfg.trainer.num_nodes, cfg.trainer.num_nodes


def options(container: Node) -> Iterator[tuple[str, str]]:
    """The options of torchrun in a container's words, with hyphens."""
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    for word in words:
        if isinstance(word, str) and (match := re.fullmatch(r"--([\w-]+)=(.*)", word, re.DOTALL)):
            yield match[1].replace("_", "-"), match[2]


def size(value: object) -> float | None:
    """A size of memory in bytes, as Kubernetes or Docker (16g) writes it; None if it is none."""
    if match := re.fullmatch(r"([\d.]+)([kmg])b?", str(value)):
        return float(match[1]) * 1024.0 ** ("kmg".index(match[2]) + 1)
    return quantity(value) if re.fullmatch(QUANTITY, str(value)) else None


def quantity(value: object) -> float:
    """A quantity of Kubernetes, such as 500m or 16Gi, as a number."""
    match = re.fullmatch(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)(\D*)", str(value))
    assert match, value  # the schema has seen it
    return float(match[1]) * UNITS[match[2]]


def pods(node: Any, path: str = "") -> Iterator[tuple[str, Node]]:
    """Each pod and template of one, with its place; not a change of one, as runtimePatches."""
    for place, value in walk(node, path):
        if isinstance(value, dict) and "runtimePatches" not in place:
            spec = value.get("spec")
            if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
                yield place, value
