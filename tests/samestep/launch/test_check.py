"""Mistakes that check must find, each planted into what is rendered; and that it finds no more."""

import random
import re
import shlex
from copy import deepcopy

import pytest

from samestep.config.compose import check as compose
from samestep.errors import ConfigError
from samestep.launch import check, render, rules
from tests.conftest import ROOT, run

TARGETS = {
    "k8s": ["cluster=k8s", "trainer.num_nodes=2", "trainer.devices=2"],
    "jobset": ["cluster=jobset", "trainer.num_nodes=2", "trainer.devices=2"],
    "pytorchjob": ["cluster=pytorchjob", "trainer.num_nodes=2", "trainer.devices=2"],
    "kubeflow": ["cluster=kubeflow", "trainer.num_nodes=2", "trainer.devices=2"],
    "elastic": ["cluster=elastic", "trainer.devices=2"],
    "elasticjob": ["cluster=elasticjob", "trainer.devices=2"],
}
C = "spec.template.spec.containers[0]"
S = "spec.template.spec"


def composed(target="k8s", *overrides, run_id="mine"):
    words = [*TARGETS[target], *overrides]
    cfg = compose(words)
    cfg.run_id = run_id
    return cfg, render.render(cfg, words)


def found(target="k8s", *overrides, run_id="mine", **planted):
    cfg, documents = composed(target, *overrides, run_id=run_id)
    for path, value in planted.items():
        plant(documents, path, value)
    return list(check.faults(cfg, documents))


def plant(documents, place, value):
    """Set the value at ``Kind:path``; None removes what is there."""
    kind, _, path = place.partition(":")
    node = next(document for document in documents if document["kind"] == kind)
    *parents, last = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", path)]
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


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_rendered_has_no_faults(target):
    assert found(target) == []
    assert (
        found(target, "trainer.accelerator=cpu", "cluster.volume=null", "cluster.user=null") == []
    )
    assert found(target, "cluster.namespace=ml", "cluster.queue=team-a") == []


RUN = [
    (["cluster.gpus=3"], "cluster.gpus=3: each process has one, so it must be trainer.devices=2"),
    (["trainer.devices=auto"], "trainer.devices=auto: a cluster must be told how many"),
    (["cluster.grace_s=90"], "cluster.grace_s=90: must be more than cluster.shutdown_s=90"),
    (["cluster.shm=17Gi"],
     "cluster.shm=17Gi: counts as memory, so it must be at most cluster.memory=16Gi"),
    (["cluster.memory=lots"], "cluster.memory=lots: must be a size, such as 512Mi or 16Gi"),
    (["cluster.image=me/project"], "cluster.image=me/project: may be another one tomorrow"),
    (["cluster.image=host:5000/project"], "may be another one tomorrow"),
    (["cluster.image='project:latest'"], "may be another one tomorrow"),
    (["cluster.namespace=My_Space"], "cluster.namespace=My_Space: must be at most 63 of a-z"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), RUN)
def test_a_run_that_no_cluster_could_take(overrides, message):
    faults = found("k8s", *overrides)
    assert len(faults) == 1
    assert message in faults[0]


def test_a_run_on_gpus_asks_for_some():
    cfg, documents = composed("k8s", "trainer.accelerator=gpu")
    cfg.cluster.gpus = None
    (fault,) = check.faults(cfg, documents)
    assert fault.startswith("cluster.gpus=null: trainer.accelerator=gpu needs some")


def test_an_elastic_run_has_at_least_its_least_number_of_nodes():
    (fault,) = found("elastic", "cluster.min_nodes=3", "cluster.max_nodes=2")
    assert fault == "cluster.min_nodes=3: must be at most cluster.max_nodes=2"


def test_an_image_by_digest_or_by_a_tag_behind_a_port_is_pinned():
    assert rules.is_pinned(f"host:5000/project@sha256:{'0' * 64}")
    assert rules.is_pinned("host:5000/project:1.0")
    assert not rules.is_pinned("project@sha256:123")


AGREEMENT = [
    ("k8s", f"Job:{C}.resources.limits.[nvidia.com/gpu]", 3, "so it must be trainer.devices=2"),
    ("k8s", f"Job:{C}.args[1]", "--nproc-per-node=4",
     "--nproc-per-node=4: must be trainer.devices=2"),
    ("k8s", f"Job:{C}.args[1]", "--nproc_per_node=4",
     "--nproc-per-node=4: must be trainer.devices=2"),
    ("k8s", f"Job:{C}.args[0]", "--nnodes=3", "--nnodes=3: must be trainer.num_nodes=2"),
    ("k8s", "Job:spec.completions", 3, "spec.completions=3: must be trainer.num_nodes=2"),
    ("k8s", "Job:spec.parallelism", 1, "spec.parallelism=1: must be trainer.num_nodes=2"),
    ("jobset", "JobSet:spec.replicatedJobs[0].template.spec.completions", 3,
     "must be trainer.num_nodes=2"),
    ("jobset", "JobSet:spec.replicatedJobs[0].template.spec.parallelism", 3,
     "must be trainer.num_nodes=2"),
    ("pytorchjob", "PyTorchJob:spec.nprocPerNode", "3",
     "nprocPerNode=3: must be trainer.devices=2"),
    ("pytorchjob", "PyTorchJob:spec.pytorchReplicaSpecs.Worker.replicas", 3,
     "3 replicas; must be trainer.num_nodes=2"),
    ("kubeflow", "TrainJob:spec.trainer.numNodes", 3, "numNodes=3: must be trainer.num_nodes=2"),
    ("kubeflow", "TrainJob:spec.trainer.numProcPerNode", 3,
     "numProcPerNode=3: must be trainer.devices=2"),
    ("elastic", f"Job:{C}.args[0]", "--nnodes=1:3",
     "must be cluster.min_nodes=1 to cluster.max_nodes=2"),
    ("elastic", "Job:spec.parallelism", 3, "must be cluster.min_nodes=1 to cluster.max_nodes=2"),
    ("elasticjob", "ElasticJob:spec.minReplicas", 2, "minReplicas=2: must be cluster.min_nodes=1"),
    ("elasticjob", "ElasticJob:spec.maxReplicas", 3, "maxReplicas=3: must be cluster.max_nodes=2"),
    ("k8s", f"Job:{S}.terminationGracePeriodSeconds", 90,
     "=90: must be more than the 90 seconds for saving"),
    ("k8s", f"Job:{C}.args[5]", "--shutdown-timeout=200",
     "=120: must be more than the 200 seconds"),
    ("k8s", f"Job:{S}.volumes[0].emptyDir.sizeLimit", "20Gi",
     "20Gi of them are memory, of which the pod may use 16Gi"),
    ("k8s", f"Job:{C}.resources.requests.memory", "17Gi",
     "requests.memory=17Gi: must be at most the limit, 16Gi"),
    ("k8s", f"Job:{C}.volumeMounts[0].name", "shn", "the pod has no volume shn"),
    ("k8s", f"Job:{S}.restartPolicy", "OnFailure",
     "restartPolicy=OnFailure: must be Never beside a podFailurePolicy"),
    ("k8s", f"Job:{S}.restartPolicy", "Always", "must be Never or OnFailure in a Job"),
    ("k8s", f"Job:{C}.name", "other", "podFailurePolicy: the pod has no container trainer"),
    ("k8s", f"Job:{C}.image", "project", f"{C}.image=project: may be another one tomorrow"),
    ("elastic", f"Deployment:{C}.image",
     "etcd:latest", f"{C}.image=etcd:latest: may be another one"),
    ("k8s", "Job:metadata.labels.team", "a b", "metadata.labels[team]=a b: must be at most 63"),
    ("k8s", "Service:metadata.name", "1-run",
     "metadata.name=1-run: must be at most 63 of a-z 0-9 -"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "place", "value", "message"), AGREEMENT)
def test_what_does_not_fit_together(target, place, value, message):
    if "[nvidia.com/gpu]" in place:  # a key with a dot
        cfg, documents = composed(target)
        documents[-1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] |= {
            "nvidia.com/gpu": value
        }
        faults = list(check.faults(cfg, documents))
    else:
        faults = found(target, **{place: value})
    assert any(message in fault for fault in faults), faults


@pytest.mark.parametrize("run_id", ["Mine", "1-run", "a_b", "a.b", "run-", "a" * 64])
def test_a_name_that_a_cluster_refuses(run_id):
    (fault,) = found(run_id=run_id)
    assert fault.startswith(f"RUN_ID={run_id}: ")


DERIVED = {  # what the controllers make of the name of a run with n nodes
    "k8s": lambda name, n: f"{name}-{n - 1}",
    "jobset": lambda name, n: f"{name}-node-0-{n - 1}-abcde",
    "kubeflow": lambda name, n: f"{name}-node-0-{n - 1}-abcde",
    "pytorchjob": lambda name, n: f"{name}-worker-{n - 1}",
}


@pytest.mark.parametrize("target", DERIVED)
def test_a_name_is_taken_only_if_all_that_is_made_of_it_fits(target):
    generator = random.Random(target)
    cfg = compose(TARGETS[target])
    taken = 0
    for _ in range(25):
        length, nodes = generator.randint(40, 63), generator.choice([1, 2, 3, 10, 11, 101, 1000])
        name = "r" + "".join(generator.choices("abc-019", k=length - 2)) + "n"
        cfg.run_id, cfg.trainer.num_nodes = name, nodes
        faults = list(check.faults(cfg, render.render(cfg, [])))
        excess = len(DERIVED[target](name, nodes)) - 63
        assert bool(faults) == (excess > 0), (name, nodes, faults)
        if faults:
            assert f"choose a RUN_ID that is {excess} shorter" in faults[0]
            cfg.run_id = name[: -excess - 1] + "n"  # the remedy helps
            assert list(check.faults(cfg, render.render(cfg, []))) == []
        taken += not faults
    assert 0 < taken < 25


@pytest.mark.parametrize("target", [*DERIVED, "elastic", "elasticjob"])
def test_any_number_of_nodes_and_devices_agrees_and_another_one_does_not(target):
    generator = random.Random(target)
    cfg = compose(TARGETS[target])
    cfg.run_id = "mine"
    for _ in range(12):
        cfg.trainer.devices = generator.randint(1, 16)
        cfg.trainer.accelerator = generator.choice(["auto", "gpu", "cpu"])
        if target.startswith("elastic"):
            cfg.cluster.min_nodes = generator.randint(1, 100)
            cfg.cluster.max_nodes = cfg.cluster.min_nodes + generator.randint(0, 9)
        else:
            cfg.trainer.num_nodes = generator.randint(1, 100)
        documents = render.render(cfg, [])
        assert list(check.faults(cfg, documents)) == []
        other = deepcopy(cfg)
        key = generator.choice(["num_nodes", "devices"])
        if key == "num_nodes" and target.startswith("elastic"):
            other.cluster.max_nodes += 1
        else:
            other.trainer[key] += 1
        assert list(check.faults(other, documents)) != [], (target, key)


def test_refuse_says_each_fault_once_and_nothing_without_one():
    with pytest.raises(ConfigError, match=r"^a\nb$"):
        check.refuse(["a", "b", "a"])
    check.refuse([])


def test_the_doorway_refuses_with_exit_code_2_and_no_traceback():
    result = run(
        "scripts/launch.py", "cluster=k8s", "cluster.shm=20Gi", "action=check", RUN_ID="mine"
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: cluster.shm=20Gi: counts as memory, so it must be at most cluster.memory=16Gi\n"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("16Gi", 16 * 2**30), (2, 2), ("1e3", 1000), ("2k", 2000), ("3E", 3e18)],
)
def test_quantities(text, value):
    assert rules.quantity(text) == value


def test_sizes_of_docker():
    assert (rules.size("16g"), rules.size(1024), rules.size("1.5m")) == (2**34, 1024, 1.5 * 2**20)
    assert rules.size("16 GB") is None


def test_a_document_that_is_for_nothing_we_know():
    cfg, documents = composed()
    assert "is none of the kinds" in "".join(check.faults(cfg, [*documents, {"services": {}}]))


def test_rules_do_not_change_what_they_look_at():
    cfg, documents = composed()
    before = deepcopy(documents)
    list(check.faults(cfg, documents))
    assert documents == before


def test_check_needs_no_torch():
    code = (
        "import sys; from samestep.launch import check, kubernetes; print('torch' in sys.modules)"
    )
    result = run("-c", code, PYTHONPATH=shlex.join([f"{ROOT}/src"]) + f":{ROOT}/scripts")
    assert result.stdout == "False\n", result.stderr
