"""What ``samestep logs`` does when its reader, its kubectl or the cluster goes away."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.labs.servers.conftest import WAIT_S, Cluster, until

pytestmark = pytest.mark.servers
COUNTS = """trap 'echo saved; exit 143' TERM; echo started; n=0
while :; do n=$((n+1)); echo line $n; [ -e {folder}/mark ] && echo marked; sleep 0.5; done"""


def test_it_ends_when_nobody_reads_it_any_more(cluster: Cluster) -> None:
    cluster.pods_do(COUNTS.format(folder=cluster.folder))
    assert cluster.launch("k8s", "mine").returncode == 0
    cluster.until_training("mine")
    with cluster.start_logs("mine", subprocess.PIPE) as logs:
        assert logs.stdout
        assert any(b"started" in line for line in logs.stdout)
        logs.stdout.close()
        assert logs.wait(WAIT_S) == 141


def test_it_goes_on_where_a_connection_broke(cluster: Cluster) -> None:
    cluster.pods_do(COUNTS.format(folder=cluster.folder))
    assert cluster.launch("k8s", "mine").returncode == 0
    cluster.until_training("mine")
    follower = cluster.follow("mine", started=2)
    broken = kubectl_of(follower.process.pid)
    assert len(broken) == 2
    for child in broken:
        os.kill(child, signal.SIGKILL)
    (cluster.folder / "mark").touch()
    for index in (0, 1):
        follower.until_shown(rf"mine-{index}\S* marked")
    assert cluster.samestep("cancel", "mine").returncode == 0
    _, log = follower.end()
    for index in (0, 1):
        found = [line for line in log.splitlines() if f"mine-{index}" in line and "line" in line]
        numbers = {int(line.rpartition(" ")[2]) for line in found}
        assert numbers >= set(range(min(numbers), max(numbers) + 1))  # none is missing
        assert any(f"mine-{index}" in line and "saved" in line for line in log.splitlines())


def kubectl_of(follower: int) -> set[int]:
    """The processes of kubectl that follow the logs."""
    found = set()
    for pid in Path(f"/proc/{follower}/task/{follower}/children").read_text().split():
        with suppress(OSError):  # it has ended meanwhile
            if b"--follow" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


def test_it_outlives_a_cluster_that_does_not_answer_for_a_while(
    cluster: Cluster, gate: "Gate"
) -> None:
    assert cluster.launch("k8s", "mine").returncode == 0
    through_the_gate = cluster.kubeconfig_of(server=f"https://127.0.0.1:{gate.port}")
    follower = cluster.follow("mine", started=1, kubeconfig=through_the_gate)
    gate.close()
    until(lambda: gate.refused > 3)
    gate.is_open = True
    assert cluster.samestep("cancel", "mine").returncode == 0
    _, log = follower.end()
    assert "mine: was removed before it ended" in log


class Gate:
    """A port through which the API server is reached, and which can be closed."""

    def __init__(self, server: str) -> None:
        self.target = urlsplit(server)
        self.is_open, self.refused = True, 0
        self.connections: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if not self.is_open:
                self.refused += 1
                near.close()
                continue
            assert self.target.hostname
            assert self.target.port
            far = socket.create_connection((self.target.hostname, self.target.port))
            self.connections += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=(source, sink), daemon=True).start()

    def copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # closed
            while block := source.recv(65536):
                sink.sendall(block)
        self.hang_up(source, sink)

    def hang_up(self, *connections: socket.socket) -> None:
        for connection in connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        """Cut all connections, and refuse new ones."""
        self.is_open = False
        self.hang_up(*self.connections)


@pytest.fixture
def gate(cluster: Cluster) -> Iterator[Gate]:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    gate = Gate(config["clusters"][0]["cluster"]["server"])
    yield gate
    gate.close()
    gate.listener.close()
