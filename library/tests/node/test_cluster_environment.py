"""Variables and options of every kind of cluster, and which node they mean. No processes."""

from dataclasses import replace

import pytest

from samestep.errors import ConfigError
from samestep.node import run_script
from samestep.node.cluster_environment import Node, read_node
from samestep.node.rendezvous import launch_config

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
    "PET_MASTER_ADDR": "cifar-node-0-0.cifar", "PET_MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {  # of a job step that srun started, of Slurm 22.05
    "SLURM_JOB_ID": "40123", "SLURM_JOB_NAME": "cifar", "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip
ELASTIC_PYTORCHJOB = {
    "PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "cifar-worker-0",
    "PET_NPROC_PER_NODE": "auto",
}  # fmt: skip
ELASTICJOB = (
    "--rdzv_backend=etcd --rdzv_endpoint=cifar-etcd:2379 --rdzv_id=cifar --nnodes=1:2 "
    "--nproc_per_node=1 --max-restarts=9"
)
FIXED = "--nnodes=2 --nproc-per-node=1 --master-addr=cifar-0.cifar"

# variables, options, and what they mean: in words, where the nodes meet, and how
CLUSTERS: dict[str, tuple[dict[str, str], str, str, str, str]] = {
    "PyTorchJob": (
        PYTORCHJOB, "", "PyTorchJob, node 1 of 2, 2 processes", "cifar-master-0:23456", "static",
    ),
    "PyTorchJob before PET": (
        RUNAI, "", "PyTorchJob, node 1 of 2, 0 process", "cifar-master-0:23456", "static",
    ),
    "Run:ai": (
        {**RUNAI, "RUNAI_PROJECT": "team-a"}, "--nproc_per_node=1",
        "Run:ai, node 1 of 2, 1 process", "cifar-master-0:23456", "static",
    ),
    "Volcano": (
        {**RUNAI, "VC_TASK_INDEX": "0"}, "--nproc-per-node=2",
        "Volcano, node 1 of 2, 2 processes", "cifar-master-0:23456", "static",
    ),
    "TrainJob": (
        TRAINJOB, "", "TrainJob, node 1 of 2, 1 process", "cifar-node-0-0.cifar:29500", "static",
    ),
    "Indexed Job, JobSet": (
        {"JOB_COMPLETION_INDEX": "1"}, FIXED,
        "Indexed Job, node 1 of 2, 1 process", "cifar-0.cifar:29500", "static",
    ),
    "Swarm": (
        {}, f"{FIXED} --node_rank 1",
        "options, node 1 of 2, 1 process", "cifar-0.cifar:29500", "static",
    ),
    "ElasticJob": (
        {}, ELASTICJOB, "options, one of 1 to 2 nodes, 1 process", "cifar-etcd:2379", "etcd-v2",
    ),
    "elastic PyTorchJob": (
        ELASTIC_PYTORCHJOB, "",
        "variables of torchrun, one of 1 to 3 nodes, 0 process", "cifar-worker-0:29400", "c10d",
    ),
    "fixed c10d": (
        {**RUNAI, "PET_STANDALONE": "0"}, "--rdzv_backend=c10d",
        "PyTorchJob, one of 2 nodes, 0 process", "cifar-master-0:23456", "c10d",
    ),
    "Slurm": (SLURM, "", "Slurm, node 1 of 2, 0 process", "gpu08:10123", "static"),
    "Slurm again": (
        {**SLURM, "SLURM_RESTART_COUNT": "3", "RANK": "9", "WORLD_SIZE": "9"},
        "--nproc-per-node=2",
        "Slurm (started again 3 times), node 1 of 2, 2 processes", "gpu08:10123", "static",
    ),
    "options win": (
        PYTORCHJOB, "--nnodes=3 --nproc-per-node=1 --node-rank=2 --master-addr=a",
        "PyTorchJob, node 2 of 3, 1 process", "a:23456", "static",
    ),
    "IPv6": (
        {"JOB_COMPLETION_INDEX": "0"}, "--nnodes=2 --master-addr=[fd00::1]:9",
        "Indexed Job, node 0 of 2, 0 process", "[fd00::1]:9", "static",
    ),
    "empty variables": (
        {"MASTER_ADDR": "", "WORLD_SIZE": "", "RUNAI_PROJECT": ""}, "",
        "Run:ai, alone, 0 process", "localhost:0", "c10d",
    ),
    "nothing": ({}, "", "this machine, alone, 0 process", "localhost:0", "c10d"),
    "one pod": (
        {**PYTORCHJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, "",
        "PyTorchJob, alone, 2 processes", "localhost:0", "c10d",
    ),
}  # fmt: skip


def read(variables: dict[str, str], options: str, *program: str) -> Node:
    return read_node({"RUN_ID": "cifar", **variables}, [*options.split(), *program], "entrypoint")


@pytest.mark.parametrize(
    ("variables", "options", "who", "endpoint", "backend"), CLUSTERS.values(), ids=CLUSTERS
)
def test_a_cluster_says_which_node_this_is(
    variables: dict[str, str], options: str, who: str, endpoint: str, backend: str
):
    given = {**variables}
    node = read(variables, options, "seed=1", "model=mlp")
    assert variables == given
    assert (str(node), node.endpoint, node.backend) == (f"{who} here", endpoint, backend)
    assert (node.run_id, node.program) == ("cifar", ["seed=1", "model=mlp"])


def test_nodes_of_slurm_meet_at_the_first():
    for nodes, first in (
        ("a,b", "a"), ("gpu[01-04,07],cpu3", "gpu01"), ("rack[2-3]n[10-11]", "rack2n10"),
        ("n-[007]-ib,x", "n-007-ib"),
    ):  # fmt: skip
        assert read({**SLURM, "SLURM_STEP_NODELIST": nodes}, "").endpoint == f"{first}:10123"


def test_what_names_a_run():
    """The rendezvous of ElasticJob, and a job of Slurm, which has the same name when restarted."""
    assert read({"RUN_ID": ""}, ELASTICJOB).run_id == "cifar"
    assert read({"RUN_ID": "mine"}, ELASTICJOB).run_id == "mine"
    assert read({**SLURM, "RUN_ID": ""}, "").run_id == "cifar-40123"
    assert read({"RUN_ID": ""}, "").run_id == ""


def test_options_end_where_the_program_begins():
    options = "--nnodes=1 --rdzv-conf timeout=9 --standalone"
    assert read({}, options, "seed=1", "--nnodes=2").program == ["seed=1", "--nnodes=2"]
    assert read({}, options).program == []
    assert read({}, f"{options} -m", "module", "-x").program == ["-m", "module", "-x"]


@pytest.mark.parametrize(
    ("variables", "options", "error"),
    [
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, "",
         "SLURM_STEP_NUM_TASKS=8: srun must start one task on each of the 2 nodes"),
        ({}, "--nnodes=0", "--nnodes=0: must be a number of nodes, or MIN:MAX"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "", "--nnodes=two: must be a number of nodes"),
        ({}, "--nnodes=1:2 --node-rank=0", "--nnodes=1:2: nodes that come and go need"),
        ({}, "--nproc-per-node=0", "--nproc-per-node=0: must be at least 1"),
        ({}, "--nproc-per-node=many", "--nproc-per-node=many: must be a whole number, auto,"),
        ({}, "--nproc-per-node=gpu", "Cuda is not available."),
        ({}, "--rdzv-conf=timeout=soon", "--rdzv-conf=timeout=soon: timeout must be whole"),
        ({}, "--node-rank=x", "entrypoint: argument --node-rank/--node_rank: invalid int value"),
        (TRAINJOB, "--node-rank=2", "node 2 of 2: nodes count from 0"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "", "--master-addr: is missing"),
        ({}, "--nnodes=2 --master-addr=a", "--node-rank: is missing"),
        (RUNAI, "--master-port=70000", "cifar-master-0:70000: the port must be from 1 to 65535"),
        (RUNAI, "--rdzv-endpoint=a:b", "The port number of the rendezvous endpoint 'a:b' must"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "", "TORCHELASTIC_RUN_ID: this is a rank of"),
        ({}, "--nodes-rank=1", "entrypoint: unrecognized arguments: --nodes-rank=1"),
        ({}, "--no-python", "--no-python, --run-path: are not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_rejected_in_one_line(
    variables: dict[str, str], options: str, error: str
):
    with pytest.raises(ConfigError) as rejected:
        read(variables, options)
    assert str(rejected.value).startswith(error)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("words", ["nowhere.py", "--nproc-per-node=2 nowhere.py --lr 1"])
def test_a_missing_script_is_one_message_and_not_one_of_each_rank(words: str):
    with pytest.raises(ConfigError, match=r"^samestep run: nowhere.py: there is"):
        run_script.main(words.split())


def settings(node: Node, *, is_here: bool) -> dict[str, object]:
    found = {"own_address": "10.0.0.1", "is_here": is_here}
    node = replace(node, processes=2, timeout_s=node.timeout_s or 300, **found)
    config = launch_config(node)
    assert (config.rdzv_endpoint, config.rdzv_backend) == (node.endpoint, node.backend)
    assert (config.min_nodes, config.max_nodes) == (node.min_nodes, node.max_nodes)
    assert (config.nproc_per_node, config.local_addr) == (2, "10.0.0.1")
    return config.rdzv_configs


def test_what_torchrun_is_told():
    assert settings(read(RUNAI, ""), is_here=True) == {"timeout": "300", "rank": 1}
    waits = {"timeout": "300", "join_timeout": "300", "read_timeout": "300"}
    elastic = read(ELASTIC_PYTORCHJOB, "")
    assert settings(elastic, is_here=False) == waits
    assert settings(elastic, is_here=True) == {**waits, "is_host": "1"}
    etcd = read({}, f"{ELASTICJOB} --rdzv-conf=last_call_timeout=9,timeout=60,read_timeout=7")
    waits = {"timeout": "60", "join_timeout": "60", "read_timeout": "7", "last_call_timeout": "9"}
    assert settings(etcd, is_here=True) == waits
    assert settings(read({}, ELASTICJOB), is_here=True)["read_timeout"] == "5"
