"""The arguments of the pods: the entry point understands them, and elastic pods meet by etcd."""

import pytest

from library.tests.node.test_cluster_environment import RUNAI as RUNAI_VARIABLES
from library.tests.node.test_cluster_environment import TRAINJOB
from samestep.hydra.compose import check
from samestep.node.cluster_environment import read_node
from tests.samestep.launch.test_targets import RUNAI, TARGETS, command, pod


@pytest.mark.parametrize(
    ("name", "given", "who", "endpoint"),
    [
        ("jobset", {"JOB_COMPLETION_INDEX": "1"}, "node 1 of 2", "cifar-node-0-0.cifar:29500"),
        ("pytorchjob", {"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "node 1 of 2",
         "cifar-worker-0:29500"),
        ("kubeflow", TRAINJOB, "node 1 of 2", "cifar-node-0-0.cifar:29500"),
        ("runai", RUNAI_VARIABLES, "node 1 of 2", "cifar-master-0:23456"),
        ("runai-v1", RUNAI_VARIABLES, "node 1 of 2", "cifar-master-0:23456"),
        ("elastic", {}, "one of 1 to 4 nodes", "cifar-etcd:2379"),
        ("elasticjob", {}, "one of 1 to 2 nodes", "cifar-etcd:2379"),
    ],
)  # fmt: skip
def test_the_entry_point_understands_arguments_of_pods(name, given, who, endpoint):
    """Together with the variables that the target's controller sets for the second pod."""
    words = command(name) if name in RUNAI else ["--", *pod(name)["spec"]["containers"][0]["args"]]
    node = read_node({"RUN_ID": "cifar", **given}, words[words.index("--") + 1 :], "entrypoint")
    assert node.program[-len(TARGETS[name]) :] == TARGETS[name]
    assert who in str(node)
    assert (node.endpoint, node.processes, node.timeout_s) == (endpoint, 2, 900)
    assert node.options.max_restarts == check(node.program).cluster.max_restarts
