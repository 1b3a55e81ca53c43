"""Options and variables of every kind of cluster, and what torchrun is told. No processes."""

import os

import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.launch import cluster_environment


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """All variables of this process, for the time of a test."""
    kept = {"PATH": os.environ["PATH"], "RUN_ID": "cifar"}
    monkeypatch.setattr(os, "environ", kept)
    return kept


PYTORCHJOB = {  # of training operator 1.9, with nprocPerNode: 2
    "MASTER_ADDR": "cifar-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "1",
    "PET_MASTER_ADDR": "cifar-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "2",
    "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2",
}  # fmt: skip
RUNAI = {
    "MASTER_ADDR": "cifar-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1", "JOB_COMPLETION_INDEX": "1",
    "PET_MASTER_ADDR": "cifar-node-0-0.cifar", "PET_MASTER_PORT": "29400",
}  # fmt: skip
SLURM = {  # of a job step that srun started, of Slurm 22.05
    "SLURM_JOB_ID": "40123", "SLURM_JOB_NAME": "cifar", "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip
ELASTICJOB = [
    "--rdzv_backend=etcd", "--rdzv_endpoint=cifar-etcd:2379", "--rdzv_id=cifar", "--nnodes=1:2",
    "--nproc_per_node=1", "--max-restarts=9",
]  # fmt: skip
FIXED = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=cifar-0.cifar"]
CLUSTERS: dict[str, tuple[dict[str, str], list[str], str, str]] = {
    "PyTorchJob": (
        PYTORCHJOB, [], "PyTorchJob, node 1 of 2, 2 processes here", "cifar-master-0:23456",
    ),
    "PyTorchJob before PET": (
        RUNAI, [], "PyTorchJob, node 1 of 2, 1 process here", "cifar-master-0:23456",
    ),
    "Run:ai": (
        {**RUNAI, "RUNAI_PROJECT": "team-a"}, ["--nproc_per_node=1"],
        "Run:ai, node 1 of 2, 1 process here", "cifar-master-0:23456",
    ),
    "Volcano": (
        {**RUNAI, "VC_TASK_INDEX": "0"}, ["--nproc-per-node=2"],
        "Volcano, node 1 of 2, 2 processes here", "cifar-master-0:23456",
    ),
    "TrainJob": (
        TRAINJOB, [], "TrainJob, node 1 of 2, 1 process here", "cifar-node-0-0.cifar:29400",
    ),
    "Indexed Job, JobSet": (
        {"JOB_COMPLETION_INDEX": "1"}, FIXED,
        "Indexed Job, node 1 of 2, 1 process here", "cifar-0.cifar:29500",
    ),
    "Swarm": (
        {}, [*FIXED, "--node_rank", "1"],
        "options, node 1 of 2, 1 process here", "cifar-0.cifar:29500",
    ),
    "ElasticJob": (
        {}, ELASTICJOB, "options, one of 1 to 2 nodes, 1 process here", "cifar-etcd:2379",
    ),
    "elastic PyTorchJob": (
        {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "cifar-worker-0",
         "PET_NPROC_PER_NODE": "auto"}, [],
        "variables of torchrun, one of 1 to 3 nodes, 1 process here", "cifar-worker-0:29400",
    ),
    "guide A": (
        RUNAI, ["--rdzv_backend=c10d"],
        "PyTorchJob, one of 2 nodes, 1 process here", "cifar-master-0:23456",
    ),
    "Slurm": (SLURM, [], "Slurm, node 1 of 2, 1 process here", "gpu08:10123"),
    "Slurm again": (
        {**SLURM, "SLURM_RESTART_COUNT": "3", "RANK": "9", "WORLD_SIZE": "9"},
        ["--nproc-per-node=2"],
        "Slurm (started again 3 times), node 1 of 2, 2 processes here", "gpu08:10123",
    ),
    "options win": (
        PYTORCHJOB, ["--nnodes=3", "--nproc-per-node=1", "--node-rank=2", "--master-addr=a"],
        "PyTorchJob, node 2 of 3, 1 process here", "a:23456",
    ),
    "nothing": ({}, [], "this machine, alone, 1 process here", "localhost:0"),
    "one pod": (
        {**PYTORCHJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, [],
        "PyTorchJob, alone, 2 processes here", "localhost:0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "options", "who", "endpoint"), CLUSTERS.values(), ids=CLUSTERS)
def test_a_cluster_is_understood(
    variables: dict[str, str], given: dict[str, str], options: list[str], who: str, endpoint: str
):
    variables.update(given)
    plan, config = cluster_environment.plan(options, check(["trainer.accelerator=cpu"]))
    assert (plan, config.rdzv_endpoint) == (who, endpoint)
    assert config.run_id == variables["RUN_ID"] == "cifar"
    assert config.rdzv_configs.get("rank") == (
        1 if "node 1" in who else 2 if "2 of 3" in who else None
    )
    assert config.rdzv_backend == (
        "static" if "node " in who else "etcd-v2" if "etcd" in endpoint else "c10d"
    )
    assert not variables.keys() & {*given} - {
        "JOB_COMPLETION_INDEX",
        "RUNAI_PROJECT",
        "VC_TASK_INDEX",
        *SLURM,
        "SLURM_RESTART_COUNT",
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[01-04,07],cpu3", "gpu01"), ("gpu[3,5-6]", "gpu3"),
     ("rack[2-3]n[10-11]", "rack2n10"), ("n-[007]-ib,x", "n-007-ib")],
)  # fmt: skip
def test_the_first_node_of_slurm_is_where_all_meet(nodes: str, first: str):
    found = cluster_environment.translate_slurm({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert found["PET_MASTER_ADDR"] == first


def test_a_job_of_slurm_without_a_run_id_has_the_same_name_after_each_restart(
    variables: dict[str, str],
):
    del variables["RUN_ID"]
    variables.update(SLURM)
    _, config = cluster_environment.plan([], check(["trainer.accelerator=cpu"]))
    assert config.run_id == variables["RUN_ID"] == "cifar-40123"


@pytest.mark.parametrize(
    ("given", "options", "error"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, [],
         "SLURM_STEP_NUM_TASKS=8: srun must start one task on each of the 2 nodes"),
        ({}, ["--nnodes=0"], "--nnodes=0: must be a number of nodes, or MIN:MAX"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, [], "--nnodes=two: must be a number of nodes"),
        ({}, ["--nnodes=3:2", "--rdzv-backend=c10d"], "--nnodes=3:2: MIN is larger than MAX"),
        ({}, ["--nnodes=1:2", "--node-rank=0"], "--nnodes=1:2: nodes that come and go need"),
        ({}, ["--nproc-per-node=0"], "--nproc-per-node=0: must be at least 1"),
        ({}, ["--nproc-per-node=many"], "Unsupported nproc_per_node value: many"),
        ({}, ["--nproc-per-node=gpu"], "Cuda is not available."),
        ({}, ["--rdzv-conf=timeout=soon"], "--rdzv-conf=timeout=soon: timeout must be a whole"),
        ({}, ["--node-rank=x"], "argument --node-rank/--node_rank: invalid int value: 'x'"),
        ({"JOB_COMPLETION_INDEX": "1"}, [], "node 1 of 1: nodes count from 0"),
        (TRAINJOB, ["--node-rank=2"], "node 2 of 2: nodes count from 0"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, [], "--master-addr: is missing"),
        ({}, ["--nnodes=2", "--master-addr=a"], "--node-rank: is missing"),
        ({}, ["--nnodes=2", "--rdzv-backend=c10d"], "--master-addr: is missing"),
        (RUNAI, ["--master-port=70000"], "cifar-master-0:70000: the port must be from 1 to 65535"),
        (RUNAI, ["--rdzv-endpoint=a:b"], "The port number of the rendezvous endpoint 'a:b' must"),
        ({**RUNAI, "RUN_ID": ""}, [], "RUN_ID: is not set; several nodes need one name"),
        ({"RUN_ID": "a/b"}, [], "RUN_ID=a/b: must be at most 63"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, [], "TORCHELASTIC_RUN_ID: this is a rank of"),
        ({}, ["--nodes-rank=1"], "unrecognized arguments: --nodes-rank=1"),
        ({}, ["--module"], "--module, --no-python, --run-path and --logs-specs: are not for"),
        ({}, ["-t3", "seed=1"], "seed=1: write options as --name=value"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(
    variables: dict[str, str], given: dict[str, str], options: list[str], error: str
):
    variables.update(given)
    with pytest.raises(ConfigError) as refused:
        cluster_environment.plan(options, check(["trainer.accelerator=cpu"]))
    assert str(refused.value).startswith(error)
    assert "\n" not in str(refused.value)


def test_the_number_of_nodes_must_be_that_of_the_configuration(variables: dict[str, str]):
    variables.update(RUNAI)
    with pytest.raises(ConfigError, match=r"trainer\.num_nodes=4: --nnodes=2 are started"):
        cluster_environment.plan([], check(["trainer.num_nodes=4"]))


def test_options_end_where_overrides_begin():
    given = ["--nnodes=2", "--rdzv-conf", "timeout=9", "--standalone", "cluster=k8s", "seed=1"]
    assert cluster_environment.split_arguments(given) == (given[:4], given[4:])
    assert cluster_environment.split_arguments([]) == ([], [])
    with pytest.raises(ConfigError, match="--nnodes=2: options of torchrun come before"):
        cluster_environment.split_arguments(["seed=1", "--nnodes=2"])
