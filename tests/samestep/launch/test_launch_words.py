"""The arguments of the pods: the entry point understands them, and elastic pods meet by etcd."""

import shutil
import subprocess
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import pytest

from library.tests.node.test_cluster_environment import RUNAI as RUNAI_VARIABLES
from library.tests.node.test_cluster_environment import TRAINJOB
from library.tests.programs import until
from samestep.hydra.compose import check
from samestep.node.cluster_environment import read_node
from tests.faults.lab import free_port
from tests.samestep.launch.test_targets import RUNAI, TARGETS, command, document, pod


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


@pytest.mark.skipif(not shutil.which("etcd"), reason="apt-get install etcd-server")
def test_etcd_understands_its_arguments_and_has_the_api_of_the_nodes(tmp_path: Path):
    """Nodes that train with theirs: test_printed_commands.py, and test_entrypoint.py."""
    url = f"127.0.0.1:{free_port()}"
    deployment = document("elastic", kind="Deployment")["spec"]["template"]["spec"]
    (container,) = deployment["containers"]
    here = {"0.0.0.0:2379": url, "cifar-etcd:2379": url, "/data/etcd": f"{tmp_path}/etcd"}
    words = [*container.get("command", ()), *container["args"]]
    for there, place in here.items():
        words = [word.replace(there, place) for word in words]
    words.append(f"--listen-peer-urls=http://127.0.0.1:{free_port()}")
    with (tmp_path / "log").open("wb") as log:
        etcd = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        until(lambda: make_key(url) == HTTPStatus.CREATED, 400, (tmp_path / "log").read_text)
    finally:
        etcd.kill()
        etcd.wait()


def make_key(address: str) -> int | None:
    """The answer to torchrun's client, which makes a key; None as long as nobody answers."""
    connection = HTTPConnection(address, timeout=5)
    try:
        connection.request("PUT", "/v2/keys/torchelastic?value=1")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()
