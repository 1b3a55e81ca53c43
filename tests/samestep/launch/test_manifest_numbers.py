"""Numbers in the manifests of every target are those of the configuration.

A manifest takes its numbers by interpolation, so a mistake is one of ours and no user can make it:
it is found here, and not looked for at run time.
"""

import random
import re
from collections.abc import Iterator
from copy import deepcopy

import pytest
import yaml

from samestep.launch import render
from samestep.launch.check.documents import find_pods, walk_mappings
from samestep.launch.check.quantities import parse_quantity
from tests.conftest import CONFIGS
from tests.samestep.launch.check.planting import (
    CONTAINER,
    POD,
    TARGETS,
    compose_once,
    composed,
    plant,
)

NODES = ("numNodes", "completions", "parallelism", "nnodes", "maxReplicas", "minReplicas")
PROCESSES = ("nprocPerNode", "numProcPerNode", "nproc-per-node")


def find_contradictions(cfg, documents) -> list[str]:
    """What in the documents does not agree with ``cfg``, or with itself."""
    return [
        fault
        for document in documents
        for check in (check_nodes, check_processes, check_pods)
        for fault in check(cfg, document)
    ]


def check_nodes(cfg, document) -> Iterator[str]:
    """Numbers of nodes."""
    low, high = number_of_nodes(cfg)
    for place, key, value in find_numbers(document, NODES):
        first, *_, last = str(value).split(":") * 2
        wanted_first, wanted_last = low, high
        if key in ("minReplicas", "maxReplicas"):
            wanted_first = wanted_last = low if key == "minReplicas" else high
        elif key != "nnodes":
            wanted_first = high
        if (int(first), int(last)) != (wanted_first, wanted_last):
            yield f"{place}={value}: {wanted_first} to {wanted_last} nodes"
    for path, node in walk_mappings(document):
        if path.endswith(("pytorchReplicaSpecs", "replicaSpecs")):
            total = sum(role["replicas"] for role in node.values())
            if total != high:
                yield f"{path}: {total} replicas of {high} nodes"


def check_processes(cfg, document) -> Iterator[str]:
    """Numbers of processes of a node, and of its GPUs."""
    for place, _, value in find_numbers(document, PROCESSES):
        if str(value) != str(cfg.trainer.devices):
            yield f"{place}={value}: {cfg.trainer.devices} processes"
    for path, node in walk_mappings(document):
        for key, value in node.items():
            if key.endswith("/gpu") and path.endswith("limits") and value != cfg.trainer.devices:
                yield f"{path}.{key}={value}: {cfg.trainer.devices} processes"


def check_pods(cfg, document) -> Iterator[str]:
    """Resources, volumes and the time to save of each pod."""
    for path, pod in find_pods(document):
        for check in (check_requests, check_mounts, check_shared_memory):
            yield from (f"{path}: {fault}" for fault in check(pod["spec"]))
        yield from (f"{path}: {fault}" for fault in check_time_to_save(cfg, pod["spec"]))


def check_requests(spec) -> Iterator[str]:
    resources = spec["containers"][0]["resources"]
    limits = resources["limits"]
    for key, value in resources["requests"].items():
        if key in limits and parse_quantity(value) > parse_quantity(limits[key]):
            yield f"requests {key}={value} of {limits[key]}"


def check_mounts(spec) -> Iterator[str]:
    volumes = [volume["name"] for volume in spec["volumes"]]
    for mount in spec["containers"][0]["volumeMounts"]:
        if mount["name"] not in volumes:
            yield f"the pod has no volume {mount['name']}"


def check_shared_memory(spec) -> Iterator[str]:
    """Volumes in memory count as memory of the pod."""
    limit = spec["containers"][0]["resources"]["limits"]["memory"]
    folders = [volume.get("emptyDir", {}) for volume in spec["volumes"]]
    sizes = [folder["sizeLimit"] for folder in folders if folder.get("medium") == "Memory"]
    if sum(map(parse_quantity, sizes)) > parse_quantity(limit):
        yield f"{sizes} in memory of {limit}"


def check_time_to_save(cfg, spec) -> Iterator[str]:
    """The pod is killed only after its processes had the time to save."""
    (container,) = spec["containers"]
    if container["name"] == cfg.cluster.container:
        saving = float(dict(find_options(container))["shutdown-timeout"])
        if spec["terminationGracePeriodSeconds"] <= saving:
            yield f"{spec['terminationGracePeriodSeconds']} s, saving takes {saving}"


def number_of_nodes(cfg) -> tuple[int, int]:
    if "max_nodes" in cfg.cluster:
        return cfg.cluster.min_nodes, cfg.cluster.max_nodes
    return cfg.trainer.num_nodes, cfg.trainer.num_nodes


def find_numbers(document, names) -> Iterator[tuple[str, str, object]]:
    """Each field and option of torchrun that has one of the names."""
    for path, node in walk_mappings(document):
        for key, value in [*node.items(), *find_options(node)]:
            if key in names:
                yield f"{path}.{key}", key, value


def find_options(container) -> Iterator[tuple[str, str]]:
    """The options of a container's arguments, with hyphens."""
    args = container.get("args")
    for word in args if isinstance(args, list) else ():
        if match := re.fullmatch(r"--([\w-]+)=(.*)", str(word), re.DOTALL):
            yield match[1].replace("_", "-"), match[2]


def kubernetes_targets() -> list[str]:
    """Every cluster in configs/cluster that has manifests for Kubernetes."""
    names = []
    for path in sorted((CONFIGS / "cluster").glob("*.yaml")):
        cluster = yaml.safe_load(path.read_text())
        is_other = "commands" in cluster or cluster.get("name") == "slurm"
        if cluster.get("name") and cluster.get("manifest") and not is_other:
            names.append(cluster["name"])
    return names


def test_every_target_is_tried():
    assert set(kubernetes_targets()) <= TARGETS.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_any_number_of_nodes_and_devices_agrees_and_another_one_does_not(target):
    generator = random.Random(target)
    cfg, _ = composed(target)
    for _ in range(8):
        cfg.trainer.devices = generator.randint(1, 16)
        cfg.trainer.accelerator = generator.choice(["auto", "gpu", "cpu"])
        if target.startswith("elastic"):
            cfg.cluster.min_nodes = generator.randint(1, 100)
            cfg.cluster.max_nodes = cfg.cluster.min_nodes + generator.randint(0, 9)
        else:
            cfg.trainer.num_nodes = generator.randint(1, 100)
        documents = render.render(cfg, [])
        assert find_contradictions(cfg, documents) == []

        other = deepcopy(cfg)
        key = generator.choice(["num_nodes", "devices"])
        if key == "num_nodes" and target.startswith("elastic"):
            other.cluster.max_nodes += 1
        else:
            other.trainer[key] += 1
        assert find_contradictions(other, documents) != [], (target, key)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_says_both_numbers(target):
    _, documents = composed(target)
    for names in (NODES, PROCESSES):
        assert [found for item in documents for found in find_numbers(item, names)]


@pytest.mark.parametrize("cluster", ["docker", "swarm"])
@pytest.mark.parametrize("devices", [[1], [1, 2], [4, 2, 8]])
def test_each_machine_of_docker_has_its_own_number_of_processes(cluster, devices):
    cfg = compose_once(f"cluster={cluster}").copy()
    cfg.run_id, cfg.cluster.devices_per_node = "mine", devices
    documents = render.render(cfg, [])
    if cluster == "swarm":
        services = documents[0]["services"]
        commands = [services[name]["command"] for name in services if name.startswith("node-")]
    else:
        commands = [document["command"] for document in documents]
    assert len(commands) == len(devices)
    for index, (command, number) in enumerate(zip(commands, devices, strict=True)):
        assert f"--nnodes={len(devices)}" in command
        assert f"--node-rank={index}" in command
        assert f"--nproc-per-node={number}" in command


PLANTED = [
    ("k8s", f"Job:{CONTAINER}.resources.limits.[nvidia.com/gpu]", 3, "gpu=3: 2 processes"),
    ("k8s", f"Job:{CONTAINER}.args[1]", "--nproc-per-node=4", "nproc-per-node=4: 2 processes"),
    ("k8s", f"Job:{CONTAINER}.args[1]", "--nproc_per_node=4", "nproc-per-node=4: 2 processes"),
    ("k8s", f"Job:{CONTAINER}.args[0]", "--nnodes=3", "nnodes=3: 2 to 2 nodes"),
    ("k8s", "Job:spec.completions", 3, "spec.completions=3: 2 to 2 nodes"),
    ("k8s", "Job:spec.parallelism", 1, "spec.parallelism=1: 2 to 2 nodes"),
    ("jobset", "JobSet:spec.replicatedJobs[0].template.spec.completions", 3, "=3: 2 to 2 nodes"),
    ("jobset", "JobSet:spec.replicatedJobs[0].template.spec.parallelism", 3, "=3: 2 to 2 nodes"),
    ("pytorchjob", f"PyTorchJob:spec.pytorchReplicaSpecs.Worker.{CONTAINER[5:]}.args[1]",
     "--nproc-per-node=3", "nproc-per-node=3: 2 processes"),
    ("pytorchjob", "PyTorchJob:spec.nprocPerNode", "3", "nprocPerNode=3: 2 processes"),
    ("pytorchjob", "PyTorchJob:spec.pytorchReplicaSpecs.Worker.replicas", 3, "3 replicas of 2"),
    ("kubeflow", "TrainJob:spec.trainer.numNodes", 3, "numNodes=3: 2 to 2 nodes"),
    ("kubeflow", "TrainingRuntime:spec.mlPolicy.numNodes", 3, "numNodes=3: 2 to 2 nodes"),
    ("kubeflow", "TrainJob:spec.trainer.numProcPerNode", 3, "numProcPerNode=3: 2 processes"),
    ("elastic", f"Job:{CONTAINER}.args[0]", "--nnodes=1:3", "nnodes=1:3: 1 to 2 nodes"),
    ("elastic", "Job:spec.parallelism", 3, "parallelism=3: 2 to 2 nodes"),
    ("elasticjob", "ElasticJob:spec.minReplicas", 2, "minReplicas=2: 1 to 1 nodes"),
    ("elasticjob", "ElasticJob:spec.maxReplicas", 3, "maxReplicas=3: 2 to 2 nodes"),
    ("elasticjob", "ElasticJob:spec.replicaSpecs.Worker.replicas", 3, "3 replicas of 2 nodes"),
    ("k8s", f"Job:{POD}.terminationGracePeriodSeconds", 90, "90 s, saving takes 90.0"),
    ("k8s", f"Job:{CONTAINER}.args[5]", "--shutdown-timeout=200", "120 s, saving takes 200.0"),
    ("k8s", f"Job:{POD}.volumes[0].emptyDir.sizeLimit", "20Gi", "['20Gi'] in memory of 16Gi"),
    ("k8s", f"Job:{CONTAINER}.resources.requests.memory", "17Gi", "memory=17Gi of 16Gi"),
    ("k8s", f"Job:{CONTAINER}.volumeMounts[0].name", "shn", "the pod has no volume shn"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "place", "value", "message"), PLANTED)
def test_a_planted_contradiction_is_found(target, place, value, message):
    cfg, documents = composed(target)
    assert find_contradictions(cfg, documents) == []
    plant(documents, place, value)
    found = find_contradictions(cfg, documents)
    assert any(message in fault for fault in found), found
