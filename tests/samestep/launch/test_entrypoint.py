"""Nodes of a cluster as processes here, and as pods with their own network where root may."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from library.tests import pods
from library.tests.node.test_cluster_environment import PYTORCHJOB
from library.tests.programs import PATIENCE_S, is_pending, until
from samestep.errors import ConfigError
from samestep.launch import entrypoint
from samestep.node import pid1
from tests.conftest import NO_PICTURES, ROOT, environment, free_port

ENTRYPOINT = [sys.executable, "-m", "samestep.launch.entrypoint"]
TRAIN = [
    "trainer.accelerator=cpu", "trainer.max_epochs=1", "data.global_batch_size=60", "model=mlp",
    NO_PICTURES, "report=false",
]  # fmt: skip
LONG = [  # epochs of at least 2 s, saved each second, until it is stopped
    *TRAIN, "trainer.max_epochs=1000", "callbacks.checkpoints.every_s=1",
    "+callbacks.slow._target_=labs.faults.saboteur.Slow", "+callbacks.slow.seconds=0.1",
]  # fmt: skip
WHY_NO_PODS = pods.why_not()


def start_here(command: list[str], log: Any, env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


class Nodes:
    """Starts entry points in the background; what each says is in ``said``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, start: Any = None, **variables: str) -> int:
        """``start`` starts it elsewhere than in a process here: command, log, variables."""
        number = len(self.processes)
        variables = {"TERMINATION_LOG": f"{self.directory}/message-{number}", **variables}
        command = [*ENTRYPOINT, *arguments, f"run_root={self.directory}"]
        with (self.directory / f"node-{number}.log").open("wb") as log:
            self.processes.append((start or start_here)(command, log, environment(**variables)))
        return number

    def said(self, number: int) -> str:
        return (self.directory / f"node-{number}.log").read_text()

    def message(self, number: int) -> str:
        path = self.directory / f"message-{number}"
        return path.read_text() if path.exists() else ""

    def wait_until(self, number: int, words: str) -> None:
        def is_said() -> bool:
            assert self.processes[number].poll() is None or words in self.said(number)
            return words in self.said(number)

        until(is_said, says=lambda: self.said(number))

    def ends(self, number: int) -> int:
        try:
            return self.processes[number].wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"node {number} goes on: {self.said(number)}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(tmp_path)
    yield started
    for process in started.processes:
        process.kill()  # its child ends with it
        process.wait()


@pytest.mark.program
def test_a_wrong_configuration_ends_with_2_and_leaves_its_message(nodes: Nodes):
    nodes.start("--nnodes=1", "model.net.width=wide", "model=cnn")
    assert nodes.ends(0) == 2
    said = nodes.said(0)
    assert said.startswith("error: model.net.width=wide")
    assert nodes.message(0) == f"exit code 2: {said.strip()}"


@pytest.mark.parametrize(
    ("variables", "arguments", "error"),
    [
        ({"RUN_ID": ""}, ["--nnodes=2", "--node-rank=1"], "--master-addr: is missing"),
        ({**PYTORCHJOB, "RUN_ID": ""}, [], "RUN_ID: is not set; several nodes need one name"),
        ({"RUN_ID": "a/b"}, [], "RUN_ID=a/b: must be at most 63"),
        (PYTORCHJOB, ["trainer.num_nodes=4"], r"trainer\.num_nodes=4: --nnodes=2 are started"),
        ({}, ["seed=1", "--nnodes=2"], "--nnodes=2: options of torchrun come before"),
        ({}, ["-m", "train"], "-m: options of torchrun come before"),
    ],
)
def test_what_does_not_fit_the_configuration_is_rejected(
    variables: dict[str, str], arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "RUN_ID": "mine", **variables})
    with pytest.raises(ConfigError, match=f"^{error}"):
        entrypoint.train_as_node(arguments)


def saboteur(nodes: Nodes, fault: str) -> list[str]:
    node = "+callbacks.saboteur"
    return [
        f"{node}._target_=labs.faults.saboteur.Saboteur", f"{node}.faults=[{fault}]",
        f"{node}.dirpath={nodes.directory}/records",
    ]  # fmt: skip


@pytest.mark.program
def test_sigterm_to_one_node_stops_all_after_saving(nodes: Nodes):
    """On Run:ai. An Indexed Job that is stopped: test_pods_find_each_other_and_one_is_replaced."""
    options = ["--nproc-per-node=1", "--max-restarts=3"]
    shared = {"RUN_ID": "stopped", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_port())
    for number in ("0", "1"):
        nodes.start(*options, *LONG, **shared, RANK=number)
    nodes.wait_until(0, "epoch 1/1000  step 20")
    nodes.processes[1].send_signal(signal.SIGTERM)
    until(lambda: not is_pending(nodes.processes[1].pid, signal.SIGTERM))
    nodes.processes[1].send_signal(signal.SIGTERM)  # must not end the agent alone
    assert [nodes.ends(0), nodes.ends(1)] == [143, 143]
    assert "Stopped by SIGTERM after step" in nodes.said(0)


@pytest.mark.program
def test_what_rank_zero_refuses_ends_the_other_node_quietly_with_the_same_exit_code(nodes: Nodes):
    """Only rank zero knows the reason; the other one only sees that its connections break."""
    options = ["--nproc-per-node=1", "--max-restarts=3", "--nnodes=2", "--master-addr=127.0.0.1"]
    options += [f"--master-port={free_port()}", *TRAIN, *saboteur(nodes, "reject step 5 0")]
    for number in ("0", "1"):
        nodes.start(*options, RUN_ID="refused", JOB_COMPLETION_INDEX=number)
    assert [nodes.ends(0), nodes.ends(1)] == [2, 2], nodes.said(1)
    assert "rank 0: error: planted rejection" in nodes.said(0)
    _, reason = nodes.said(1).splitlines()  # after the line that says where the nodes meet
    assert reason == "entrypoint: rank 1: error: planted rejection"
    assert nodes.message(1) == "exit code 2: rank 1: error: planted rejection"


@pytest.mark.program
def test_a_killed_rank_is_named_with_exit_code_137(nodes: Nodes):
    nodes.start("--nproc-per-node=2", *TRAIN, *saboteur(nodes, "kill step 5 1"))
    assert nodes.ends(0) == 137
    assert nodes.said(0).endswith("entrypoint: rank 1 was ended by SIGKILL (out of memory?)\n")
    assert nodes.message(0) == "exit code 137: rank 1 was ended by SIGKILL (out of memory?)"
    # The other rank says one line, and its log has the rest.
    assert nodes.said(0).count("error: rank 0 has lost its connection to another rank") == 1
    assert "Traceback" not in nodes.said(0)
    (log,) = nodes.directory.glob("*/logs/rank-0.log")
    assert "Traceback" in log.read_text()


@pytest.mark.program
def test_the_message_holds_the_error_of_the_rank_that_failed_first_without_secrets(nodes: Nodes):
    nodes.start(
        "--nproc-per-node=2", *TRAIN, *saboteur(nodes, "error step 5 1"), MY_TOKEN="planted error"
    )
    assert nodes.ends(0) == 1
    assert nodes.message(0) == "exit code 1: rank 1: RuntimeError: ***"


@pytest.mark.program
def test_missing_data_end_all_ranks_with_2_and_are_not_tried_again(nodes: Nodes):
    words = ["data=cifar10", "cluster=k8s", f"data.root={nodes.directory}"]
    nodes.start("--nproc-per-node=2", "--max-restarts=16", *words)
    assert nodes.ends(0) == 2, nodes.said(0)
    assert re.match(r"exit code 2: rank \d: error: .*Dataset not found", nodes.message(0))
    # Of whichever rank was first.
    assert len(re.findall(r"\nrank \d: error: ", nodes.said(0))) == 1
    assert "Traceback" not in nodes.said(0)
    assert not list(nodes.directory.glob("*/config.yaml"))


def test_a_message_fits_into_what_kubernetes_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERMINATION_LOG", f"{tmp_path}/message")
    assert pid1.report(1, "error: " + "ä" * 5000) == 1
    message = (tmp_path / "message").read_bytes()
    assert 4094 <= len(message) <= 4096
    assert message.decode().endswith("ä")


@pytest.mark.program
def test_a_node_that_never_comes_ends_the_wait_with_one_error(nodes: Nodes):
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--node-rank=1", "--master-addr=nowhere.invalid"]
    nodes.start(*options, "cluster.timeout_s=2", RUN_ID="late")
    options = ["--nnodes=1:2", "--rdzv-backend=etcd-v2", f"--rdzv-endpoint={endpoint}"]
    nodes.start(*options, "--rdzv-conf=timeout=2", RUN_ID="late")
    for number, name, error in (
        (0, "nowhere.invalid", "no route to nowhere.invalid after 2 s ("),
        (1, "127.0.0.1", f"{endpoint} does not answer after 2 s (Connection refused). "),
    ):
        assert nodes.ends(number) == 1
        waits, said = nodes.said(number).splitlines()
        assert waits.startswith(f"entrypoint: waits for {name} (")
        assert said.startswith(f"error: {error}")
        assert nodes.message(number) == f"exit code 1: {said}"


@pytest.mark.program
def test_sigterm_ends_a_wait_at_once(nodes: Nodes):
    options = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1"]
    nodes.start(*options, f"--master-port={free_port()}", RUN_ID="waits")
    nodes.wait_until(0, "meets at")
    nodes.processes[0].send_signal(signal.SIGTERM)
    assert nodes.ends(0) == 143
    assert nodes.message(0) == "exit code 143: ended by SIGTERM before the ranks had started"


@pytest.mark.program
def test_ranks_whose_agent_was_killed_save_and_are_waited_for(nodes: Nodes):
    nodes.start("--nproc-per-node=2", *LONG, RUN_ID="orphans")
    nodes.wait_until(0, "epoch 1/1000  step 1/")
    supervisor = nodes.processes[0].pid
    child = int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text())
    os.kill(child, signal.SIGKILL)
    assert nodes.ends(0) == 137
    assert "Stopped by SIGTERM after step" in nodes.said(0)
    assert nodes.message(0) == (
        "exit code 137: error: the agent of torchrun was ended by SIGKILL (out of memory?)"
    )


@pytest.mark.program
@pytest.mark.skipif(bool(WHY_NO_PODS), reason=WHY_NO_PODS)
def test_pods_find_each_other_and_one_is_replaced(nodes: Nodes):
    """A pod of an Indexed Job is late, a name is later, and one is lost in the middle."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=pods-0.pods", "--max-restarts=3"]

    def start(index: int) -> subprocess.Popen[bytes]:
        number = nodes.start(
            *options, *LONG, start=partial(cluster.start, f"pods-{index}"),
            RUN_ID="pods", JOB_COMPLETION_INDEX=str(index),
        )  # fmt: skip
        return nodes.processes[number]

    with pods.cluster(nodes.directory) as cluster:
        second = start(1)
        nodes.wait_until(0, "waits for pods-0.pods (")
        cluster.names.append("pods-0")
        address = cluster.address(3)  # its Service knows it before it listens
        cluster.records[f"pods-0.pods.{pods.DOMAIN}"] = address
        nodes.wait_until(0, f"meets at pods-0.pods:29500 ({address} over eth0), run pods")
        first = start(0)
        nodes.wait_until(1, "epoch 1/1000  step 20")
        second.kill()
        second.wait()
        third = start(1)
        nodes.wait_until(1, "epoch 2/1000  step 40")
        pods.signal_pod(third)
        assert third.wait(PATIENCE_S) == first.wait(PATIENCE_S) == 143
    assert "Stopped by SIGTERM after step" in nodes.said(1)
    assert "death signal" not in nodes.said(1)  # a warning of torchrun's agent
    assert len(list(nodes.directory.glob("message-*"))) == 0


@pytest.mark.program
@pytest.mark.skipif(bool(WHY_NO_PODS), reason=WHY_NO_PODS)
def test_workstations_whose_own_name_leads_nowhere_meet_by_c10d(nodes: Nodes):
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=meeting"]
    with pods.cluster(nodes.directory) as cluster:
        cluster.records[f"meeting.{pods.DOMAIN}"] = cluster.address(2)
        for number in (0, 1):
            start = partial(cluster.start, f"ws-{number}", own="127.0.1.1")
            nodes.start(*options, *TRAIN, start=start, RUN_ID="ws")
        assert [nodes.ends(0), nodes.ends(1)] == [0, 0]
        for number in (0, 1):
            place = f"meets at meeting:29400 ({cluster.address(2)} over eth0)"
            assert place in nodes.said(number)
