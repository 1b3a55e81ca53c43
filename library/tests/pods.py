"""Pods on this machine: network namespaces with their own process 1, host name and DNS."""

import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from library.tests.programs import ROOT

DOMAIN = "ml.svc.cluster.local"
ENTER = str(Path(__file__).with_name("enter_pod.py"))
DROPPED = (
    "needs packets to pass between pods, which this machine drops, as Docker sets it up; "
    "iptables -I FORWARD -i pods+ -j ACCEPT lets them pass"
)
ANSWER_S = 10  # a machine that forwards packets answers at once


@functools.cache
def why_not() -> str:
    """What this machine lacks for pods; nothing if they can be made."""
    for program in ("ip", "mount", "hostname", "nsenter", "timeout"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if os.geteuid() != 0:
        return "needs root"
    name = f"try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if tried.returncode:
        return "needs the right to make network namespaces"
    return "" if are_packets_forwarded() else DROPPED


def are_packets_forwarded() -> bool:
    """Whether a pod reaches another one; otherwise its ranks would wait for each other in vain."""
    name = f"podstry{os.getpid()}"
    spaces = [f"{name}-1", f"{name}-2"]
    ip(f"link add {name} type bridge")
    try:
        ip(f"link set {name} up")
        for number, space in enumerate(spaces, start=1):
            connect(space, f"p{os.getpid()}t{number}", name, f"10.255.255.{number}")
        # No process listens there, so the other pod refuses the connection.
        tried = subprocess.run(
            ["nsenter", f"--net=/run/netns/{spaces[0]}", "timeout", str(ANSWER_S),
             "bash", "-c", "exec 3<> /dev/tcp/10.255.255.2/9"],
            capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False,
        )  # fmt: skip
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        ip(f"link del {name}")
    return "Connection refused" in tried.stderr


def connect(space: str, link: str, bridge: str, address: str) -> None:
    """Make a network namespace with this address, behind a port of the bridge."""
    for line in (
        f"netns add {space}",
        f"link add {link} type veth peer name eth0 netns {space}",
        f"link set {link} master {bridge} up",
        f"-n {space} addr add {address}/24 dev eth0",
        f"-n {space} link set eth0 up",
        f"-n {space} link set lo up",
    ):
        ip(line)


class Cluster:
    """A bridge with a name server at 10.N.0.1, and pods at 10.N.0.2 and after.

    ``records`` maps full names to addresses; a name can be added or moved at any time. Of its
    own name a pod knows the address from the start, as the kubelet writes it into /etc/hosts.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 1 + os.getpid() % 250
        self.bridge = f"pods{self.number}"
        self.records: dict[str, str] = {}
        self.names: list[str] = []
        self.pods: list[subprocess.Popen[bytes]] = []
        (directory / "resolv").write_text(
            f"nameserver {self.address(1)}\nsearch {DOMAIN}\noptions ndots:5 timeout:1 attempts:1\n"
        )

    def address(self, host: int) -> str:
        return f"10.{self.number}.0.{host}"

    def start(
        self,
        hostname: str,
        command: list[str],
        log: BinaryIO,
        env: dict[str, str],
        own: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Run a command as process 1 of a pod; one with the same name as before replaces it.

        ``own`` is what /etc/hosts says of its own name: Debian's 127.0.1.1, if not its address.
        """
        if hostname not in self.names:
            self.names.append(hostname)
        host = 2 + self.names.index(hostname)
        space, link, address = f"{self.bridge}-{host}", f"p{self.number}v{host}", self.address(host)
        if not Path("/run/netns", space).exists():
            connect(space, link, self.bridge, address)
            ip(f"-n {space} route add default via {self.address(1)}")
        hosts = f"127.0.0.1 localhost\n{own or address} {hostname}.{DOMAIN} {hostname}\n"
        (self.directory / f"hosts-{hostname}").write_text(hosts)
        pod = subprocess.Popen(
            [sys.executable, ENTER, space, hostname, str(self.directory), *command],
            cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        self.pods.append(pod)
        return pod

    def answer(self, server: socket.socket) -> None:
        """Be the name server until an empty datagram comes."""
        while (received := server.recvfrom(4096))[0]:
            query, client = received
            labels, position = [], 12
            while length := query[position]:
                labels.append(query[position + 1 : position + 1 + length].decode().lower())
                position += length + 1
            address = self.records.get(".".join(labels))
            wants_ipv4 = query[position + 1 : position + 3] == b"\0\1"
            data = b""
            if address and wants_ipv4:
                data = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 5, 4)
                data += socket.inet_aton(address)
            flags = 0x8580 if address else 0x8583  # 3: no such name
            header = query[:2] + struct.pack(">HHHHH", flags, 1, bool(data), 0, 0)
            server.sendto(header + query[12 : position + 5] + data, client)


def ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, capture_output=True)


def signal_pod(pod: subprocess.Popen[bytes], signum: int = signal.SIGTERM) -> None:
    """Send a signal to process 1 of a pod, as the kubelet does."""
    children = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text()
    os.kill(int(children.split()[0]), signum)


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster that is gone afterwards, pods included."""
    made = Cluster(directory)
    ip(f"link add {made.bridge} type bridge")
    try:
        ip(f"addr add {made.address(1)}/24 dev {made.bridge}")
        ip(f"link set {made.bridge} up")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
            server.bind((made.address(1), 53))
            thread = threading.Thread(target=made.answer, args=(server,))
            thread.start()
            try:
                yield made
            finally:
                server.sendto(b"", server.getsockname())
                thread.join()
    finally:
        for pod in made.pods:
            pod.kill()  # and with it all processes of the pod
            pod.wait()
        for host in range(2, 2 + len(made.names)):
            # It would go some time after its namespace, and the next cluster has the same names.
            ip(f"link del p{made.number}v{host}")
            ip(f"netns del {made.bridge}-{host}")
        ip(f"link del {made.bridge}")
