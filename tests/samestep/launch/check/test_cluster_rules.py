"""Configurations that no cluster could run."""

import random

import pytest
from omegaconf import OmegaConf

from samestep.launch import check, render
from samestep.launch.check import cluster_rules
from tests.samestep.launch.check.planting import TARGETS, compose_once, composed, found

RULES = [
    (["cluster.gpus=3"], "cluster.gpus=3: each process has one, so it must be trainer.devices=2"),
    (["trainer.devices=auto"], "trainer.devices=auto: a cluster must be told how many"),
    (["cluster.grace_s=90"], "cluster.grace_s=90: must be more than cluster.shutdown_s=90"),
    (["cluster.shm=17Gi"],
     "cluster.shm=17Gi: counts as memory, so it must be at most cluster.memory=16Gi"),
    (["cluster.memory=lots"], "cluster.memory=lots: must be a size, such as 512Mi or 16Gi"),
    (["cluster.shm=lots"], "cluster.shm=lots: must be a size, such as 512Mi or 16Gi"),
    (["cluster.cpu_limit=2"],
     "cluster.cpus=4: must be at most cluster.cpu_limit=2; raise the limit"),
    (["cluster.cpus=1500m", "cluster.cpu_limit=1"],
     "cluster.cpus=1500m: must be at most cluster.cpu_limit=1"),
    (["cluster.image=me/project"], "cluster.image=me/project: may name another image tomorrow"),
    (["cluster.image=host:5000/project"], "may name another image tomorrow"),
    (["cluster.image='project:latest'"], "may name another image tomorrow"),
    (["cluster.namespace=My_Space"], "cluster.namespace=My_Space: must be at most 63 of a-z"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), RULES)
def test_a_configuration_that_no_cluster_could_run(overrides, message):
    (fault,) = found("k8s", *overrides)
    assert message in fault


RANKS = [
    (["cluster=k8s", "trainer.num_nodes=3", "trainer.devices=11"], "33, one sample for each of 33"),
    (["cluster=k8s", "trainer.devices=3", "trainer.accumulate_grad_batches=11"],
     "at least 33, one sample for each of 3 ranks x trainer.accumulate_grad_batches=11"),
    (["cluster=swarm", "cluster.devices_per_node=[1,32]"], "one sample for each of 33 ranks"),
    (["cluster=elastic", "cluster.max_nodes=33"], "one sample for each of 33 ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), RANKS)
def test_a_batch_that_every_container_would_refuse(overrides, message):
    cfg = compose_once(*overrides).copy()
    cfg.run_id = "mine"
    (fault,) = cluster_rules.check_cluster(cfg)
    assert fault.startswith("data.global_batch_size=32: must be at least 33, one sample for ")
    assert message in fault
    cfg.data.global_batch_size = 33
    assert list(cluster_rules.check_cluster(cfg)) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster=swarm", "cluster.devices_per_node=[1,2]", "data.global_batch_size=512"],
        ["cluster=swarm", "cluster.devices_per_node=[1,2]", "cluster.shares=[1, 2.5]"],
        ["cluster=docker", "cluster.devices_per_node=[1,2]", "cluster.shares=[1, 2.5, 2.5]"],
        ["cluster=k8s", "trainer.num_nodes=3", "cluster.shares=[1,1,2]"],
        ["cluster=elastic", "cluster.max_nodes=4", "cluster.shares=auto"],
    ],
)
def test_shares_that_fit_every_number_of_ranks(overrides: list[str]):
    cfg = compose_once(*overrides).copy()
    cfg.run_id = "mine"
    assert list(cluster_rules.check_cluster(cfg)) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=swarm", "cluster.devices_per_node=[1,2,2]"], "5 ranks on 3 nodes"),
        (["cluster=elastic", "cluster.min_nodes=2", "cluster.max_nodes=4"], "3 ranks on 3 nodes"),
    ],
)
def test_shares_that_some_number_of_ranks_would_refuse(overrides: list[str], message: str):
    cfg = compose_once(*overrides, "cluster.shares=[1, 2.5]").copy()
    cfg.run_id = "mine"
    (fault,) = cluster_rules.check_cluster(cfg)
    assert fault.startswith(f"cluster.shares=[1, 2.5]: the run may have {message}; give one number")


@pytest.mark.parametrize(
    ("secret", "num_faults"),
    [("{group: g, key: k}", 1), ("g", 1), ("{group: g, key: k, env_var: E}", 0), ("null", 0)],
)
def test_a_secret_of_flyte_has_a_variable(secret: str, num_faults: int):
    words = ["cluster=flyte", "cluster.image=ours:1", f"cluster.secret={secret}"]
    cfg = compose_once(*words, "trainer.devices=1").copy()
    cfg.run_id = "mine"
    faults = list(cluster_rules.check_cluster(cfg))
    assert len(faults) == num_faults
    assert all("cluster.secret=" in f and "group, key, env_var" in f for f in faults)


def test_pods_without_a_volume_have_no_data():
    (fault,) = found("k8s", "data=cifar10", "cluster.volume=null")
    assert fault == (
        "cluster.volume=null: data=cifar10 needs data/cifar-10-batches-py/data_batch_1 and 5 more "
        "files, which the pods do not download; name a claim that has them, or say "
        "cluster.download=true"
    )
    assert found("k8s", "data=cifar10", "cluster.volume=null", "cluster.download=true") == []
    assert found("k8s", "data=cifar10", "cluster.volume=null", "data.root=/images") == []
    assert found("k8s", "data=cifar10") == []


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["cluster=k8s"], "cluster.volume=project must have data/cifar-10-batches-py/data_batch_1"),
        (["cluster=runai"], "cluster.volume=project must have data/cifar-10-batches-py"),
        (["cluster=docker"], "cluster.data=project-data must have data/cifar-10-batches-py"),
    ],
)
def test_what_the_user_must_put_into_the_volume_is_said(overrides, place):
    (note,) = check.notes(compose_once(*overrides, "data=cifar10"))
    assert note.startswith(f"data=cifar10: the pods do not download it; {place}")
    assert list(check.notes(compose_once(*overrides))) == []  # digits need no files


def test_a_workflow_of_flyte_fetches_its_data():
    assert list(check.notes(compose_once("cluster=flyte", "data=cifar10"))) == []


def test_a_class_of_kueue_needs_a_queue():
    (fault,) = found("k8s", "cluster.queue_priority=high")
    assert fault == (
        "cluster.queue_priority=high: is a class of Kueue and needs cluster.queue; without a "
        "queue, say cluster.priority_class"
    )
    assert found("k8s", "cluster.queue_priority=high", "cluster.queue=team-a") == []
    (fault,) = found("k8s", "cluster.priority_class=Very_High")
    assert "spec.priorityClassName=Very_High: must be at most 253 of a-z" in fault


def test_a_run_on_gpus_asks_for_some():
    cfg, documents = composed("k8s", "trainer.accelerator=gpu")
    cfg.cluster.gpus = None
    (fault,) = check.faults(cfg, documents)
    assert fault.startswith("cluster.gpus=null: trainer.accelerator=gpu needs some")


def test_an_elastic_run_has_at_least_its_least_number_of_nodes():
    (fault,) = found("elastic", "cluster.min_nodes=3", "cluster.max_nodes=2")
    assert fault == "cluster.min_nodes=3: must be at most cluster.max_nodes=2"


def test_a_system_that_makes_the_pods_needs_a_volume():
    cfg = compose_once("cluster=runai", "cluster.volume=null").copy()
    cfg.run_id = "mine"
    (fault,) = check.faults(cfg, [])
    assert fault.startswith("cluster.volume=null: must be the name of a claim")


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["cluster=elastic", "trainer.num_nodes=2"],
         ["trainer.num_nodes=2: stays 1 with cluster=elastic; cluster.max_nodes says how many"]),
        (["cluster=swarm", "trainer.num_nodes=2"],
         ["trainer.num_nodes=2: stays 1 with cluster=swarm; "
          "cluster.devices_per_node says how many"]),
        (["cluster=swarm", "trainer.devices=2"],
         ["trainer.devices=2: stays 1 with cluster=swarm; cluster.devices_per_node says how many"]),
        (["cluster=docker", "trainer.devices=2", "trainer.num_nodes=3"],
         ["trainer.num_nodes=3: stays 1 with cluster=docker; "
          "cluster.devices_per_node says how many",
          "trainer.devices=2: stays 1 with cluster=docker; "
          "cluster.devices_per_node says how many"]),
        (["cluster=docker", "trainer.devices=auto"],
         ["trainer.devices=auto: a cluster must be told how many; say trainer.devices=N"]),
    ],
)  # fmt: skip
def test_a_value_that_the_cluster_fixes(overrides, messages):
    cfg = compose_once(*overrides).copy()
    cfg.run_id = "mine"
    assert sorted(cluster_rules.check_cluster(cfg)) == sorted(messages)


def test_a_cluster_says_itself_what_it_fixes():
    cfg = compose_once("cluster=k8s", "trainer.num_nodes=2").copy()
    cfg.run_id = "mine"
    assert list(cluster_rules.check_cluster(cfg)) == []
    fixed = {
        "trainer.num_nodes": {"value": 1, "because": "cluster.rooms says how many"},
        "trainer.accelerator": {"value": "cpu", "because": "it has no GPUs"},
    }
    OmegaConf.update(cfg, "cluster", {"fixed": fixed}, force_add=True)
    assert list(cluster_rules.check_cluster(cfg)) == [
        "trainer.num_nodes=2: stays 1 with cluster=k8s; cluster.rooms says how many",
        "trainer.accelerator=auto: stays cpu with cluster=k8s; it has no GPUs",
    ]


@pytest.mark.parametrize("run_id", ["Mine", "1-run", "a_b", "a.b", "run-", "a" * 64])
def test_a_name_that_a_cluster_refuses(run_id):
    (fault,) = found(run_id=run_id)
    assert fault.startswith(f"RUN_ID={run_id}: names things in the cluster")


LAST_NAMES = {  # the longest name that is made of the name of a run with n nodes
    "k8s": lambda name, n: f"{name}-{n - 1}",
    "jobset": lambda name, n: f"{name}-node-0-{n - 1}-abcde",
    "kubeflow": lambda name, n: f"{name}-node-0-{n - 1}-abcde",
    "pytorchjob": lambda name, n: f"{name}-worker-{n - 1}",
    "elastic": lambda name, n: f"{name}-etcd",
    "elasticjob": lambda name, n: f"{name}-worker-{n - 1}",
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_name_is_taken_only_if_all_that_is_made_of_it_fits(target):
    """For runs of 101 to 1000 nodes to the character; smaller runs could have longer names."""
    generator = random.Random(target)
    cfg, _ = composed(target)
    cfg.rules = None  # the batch is no matter of names
    taken = []
    for _ in range(25):
        length, nodes = generator.randint(40, 63), generator.choice([1, 2, 3, 10, 11, 101, 1000])
        name = "r" + "".join(generator.choices("abc-019", k=length - 2)) + "n"
        cfg.run_id = name
        if target.startswith("elastic"):
            cfg.cluster.max_nodes = nodes
        else:
            cfg.trainer.num_nodes = nodes
        faults = list(cluster_rules.check_cluster(cfg))
        excess = len(LAST_NAMES[target](name, 1000)) - 63
        assert bool(faults) == (excess > 0), (name, nodes, faults)
        if faults:
            assert f"choose a RUN_ID that is {excess} shorter" in faults[0]
            cfg.run_id = name[: -excess - 1] + "n"  # the remedy helps
            assert list(cluster_rules.check_cluster(cfg)) == []
        else:
            assert len(LAST_NAMES[target](name, nodes)) <= 63
            taken.append(name)
    assert 0 < len(taken) < 25
    cfg.run_id = max(taken, key=len)
    assert list(check.faults(cfg, render.render(cfg, []))) == []


def test_a_cluster_says_itself_how_much_it_appends_to_a_name():
    cfg, _ = composed("k8s", run_id="a" * 50)
    assert list(cluster_rules.check_cluster(cfg)) == []
    OmegaConf.update(cfg, "cluster.longest_suffix", 20, force_add=True)
    assert list(cluster_rules.check_cluster(cfg)) == [
        f"RUN_ID={'a' * 50}: has 50 characters, and the cluster appends up to 20, which makes more "
        "than 63; choose a RUN_ID that is 7 shorter"
    ]


def test_submitting_needs_an_image_of_the_user():
    cfg, _ = composed()
    (fault,) = check.check_examples(cfg)
    assert "is only an example; build and push an image" in fault
    cfg.cluster.image = "ghcr.io/me/project:1.0"
    assert list(check.check_examples(cfg)) == []
