"""The objects that controllers make of ours are checked too."""

import random

import pytest

from samestep.launch import check, render
from samestep.launch.check.controllers import make_objects
from tests.samestep.launch.check.planting import TARGETS, composed, refused

MADE = {
    "k8s": [],
    "jobset": ["Service mine", "Job mine-node-0"],
    "kubeflow": ["JobSet mine", "Service mine", "Job mine-node-0"],
    "pytorchjob": ["Service mine-worker-1", "Pod mine-worker-1"],
    "elastic": [],
    "elasticjob": ["Service mine-worker-1", "Pod mine-worker-1"],
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_controller_makes_these_objects(target):
    _, documents = composed(target)
    made = [made for _, made in make_objects(documents)]
    assert [f"{item['kind']} {item['metadata']['name']}" for item in made] == MADE[target]
    for item in made:
        if item["kind"] == "Job":
            numbers = [item["spec"][key] for key in ("completions", "parallelism")]
            assert (item["spec"]["completionMode"], numbers) == ("Indexed", [2, 2])


def test_a_fault_names_the_object_that_could_not_be_made():
    place = "TrainingRuntime:spec.template.spec.replicatedJobs[0].template.spec"
    (fault,) = refused(
        "kubeflow", **{f"{place}.podFailurePolicy.rules[1].onExitCodes.values": [9, 2]}
    )
    assert fault.startswith("TrainJob mine: its Job mine-node-0: spec.podFailurePolicy.rules[1]")


def test_a_pod_of_an_operator_is_checked():
    place = "PyTorchJob:spec.pytorchReplicaSpecs.Worker.template.spec.tolerations"
    (fault,) = refused("pytorchjob", **{place: [{"value": "x"}]})
    assert fault.startswith("PyTorchJob mine: its Pod mine-worker-1: spec.tolerations[0].key")


CHOICES = {
    "trainer.accelerator": ["auto", "gpu", "cpu"],
    "cluster.namespace": [None, "ml"],
    "cluster.queue": [None, "team-a"],
    "cluster.priority_class": [None, "high"],
    "cluster.volume": [None, "project"],
    "cluster.user": [None, 1000],
    "cluster.cpus": ["500m", 4],
    "cluster.cpu_limit": [None, 8],
    "cluster.backoff_limit": [0, 12, 1000],
    "cluster.node_selector": [None, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}],
    "cluster.tolerations": [None, [{"key": "spot", "operator": "Exists"}]],
    "cluster.env": [None, [{"name": "NCCL_DEBUG", "value": "INFO"}]],
    "cluster.secret": [None, "project"],
}


@pytest.mark.parametrize("target", TARGETS)
def test_no_accepted_configuration_breaks_a_rule_of_a_server(target):
    """Random configurations: either the configuration is refused, or nothing in the render is."""
    generator, cfg = random.Random(target), composed(target)[0]
    accepted = 0
    for _ in range(20):
        for key, values in CHOICES.items():
            group, name = key.split(".")
            cfg[group][name] = generator.choice(values)
        devices, nodes = generator.choice([1, 2, 8]), generator.choice([1, 2, 3, 10, 101, 1000])
        cfg.trainer.devices, cfg.data.global_batch_size = devices, 1
        if target.startswith("elastic"):
            cfg.cluster.min_nodes, cfg.cluster.max_nodes = 1, nodes
        else:
            cfg.trainer.num_nodes = nodes
        cfg.trainer.accumulate_grad_batches = 1
        cfg.rules = None  # the batch is no matter of the servers
        cfg.run_id = "r" + "a" * generator.randint(0, 62)
        is_refused = list(check.cluster_rules.check_cluster(cfg)) != []
        documents = render.render(cfg, ["seed=1"])
        assert is_refused or list(check.faults(cfg, documents)) == [], cfg.run_id
        accepted += not is_refused
    assert accepted > 5
