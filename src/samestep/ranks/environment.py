"""What the surroundings say: ranks, the name of the run, processors, the network, secrets.

The only file of the project that reads or writes environment variables.
"""

import fcntl
import hashlib
import os
import platform
import secrets
import socket
import struct
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

ELSEWHERE = "203.0.113.1"  # reserved for documentation: only a default route leads there
SIOCGIFADDR = 0x8915  # asks for the IPv4 address of an interface; Linux


def rank() -> int:
    """Rank of this process among all, as torchrun says; 0 without torchrun."""
    return int(os.environ.get("RANK", 0)) if under_torchrun() else 0


def local_rank() -> int:
    """Rank of this process among those of its node, as torchrun says; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun() else 0


def world_size() -> int:
    """Number of ranks on all nodes, as torchrun says; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1)) if under_torchrun() else 1


def local_world_size() -> int:
    """Number of ranks on this node, as torchrun says; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if under_torchrun() else 1


def num_nodes() -> int:
    """Number of nodes (torchrun agents) of this run; 1 without torchrun."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1)) if under_torchrun() else 1


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_id() -> str | None:
    """Name of the run: ``$RUN_ID``, else torchrun's run id, else None.

    Static rendezvous calls every run ``none``, which would put them all into one directory.
    """
    torchrun_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get("RUN_ID") or (None if torchrun_id == "none" else torchrun_id)


def new_run_id(*words: str) -> str:
    """A name that no other run has, such as ``digits-cnn-3f2a1b``.

    Under torchrun it is made of its agent, so ranks that the agent starts again find their run.
    """
    token = secrets.token_bytes(8)
    agent = Path(f"/proc/{os.getppid()}/stat")
    if under_torchrun() and agent.exists():
        started = agent.read_text().rpartition(")")[2].split()[19]  # in clock ticks since boot
        token = f"{platform.node()} {os.getppid()} {started}".encode()
    return "-".join([*words, hashlib.sha256(token).hexdigest()[:6]]).lower()


def cpus_per_rank() -> int:
    """Processors each rank of this node may use, at least 1, within the container's limit.

    Torch counts the processors of the host, which a container may not use in full.
    Source: kernel documentation, cgroup v2, ``cpu.max``.
    """
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    cpu_max = Path("/sys/fs/cgroup/cpu.max")
    quota, period = cpu_max.read_text().split() if cpu_max.exists() else ("max", "100000")
    if quota != "max":
        allowed = min(allowed, int(quota) / int(period))
    return max(1, int(allowed / local_world_size()))


def memory_bytes() -> int:
    """Memory that this process may use, within the container's limit.

    Source: kernel documentation, cgroup v2, ``memory.max``.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def limit_threads(num_processes: int = 1) -> None:
    """Share the processors among the processes of this one; call before torch is imported.

    Threads that wait must sleep: spinning ones take the processor from the other ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus_per_rank() // num_processes)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def interface_to(address: str) -> str | None:
    """Name of the interface that leads to an IPv4 address, None if there is none.

    For a loopback address, such as Debian's 127.0.1.1, it is that of the default route: other
    nodes reach this one there.

    Raises:
        OSError: if no network leads to the address.
    """
    own = address_towards(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("40s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(reply[20:24]) == own:
                return name
    return None


def address_of(name: str | None) -> str:
    """Address of a node, IPv4 where it has one; OSError while nobody knows the name."""
    found = socket.getaddrinfo(name, None)
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])


def address_towards(address: str) -> str:
    """This node's own address on the way to another, as ``interface_to`` finds the way."""
    itself = ip_address(address).is_loopback
    target = ELSEWHERE if itself else address
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        error = probe.connect_ex((target, 9))  # sends nothing
        if error and not itself:
            raise OSError(error, os.strerror(error))
        return address if error else str(probe.getsockname()[0])


def set_variable(name: str, value: str) -> None:
    """Set a variable for the processes started here, or for a library that has no other way."""
    os.environ[name] = value


def variables() -> dict[str, str]:
    """A copy of them all, for who must find out by whom this container was started."""
    return dict(os.environ)


def unset_variables(names: Iterable[str]) -> None:
    """Take variables away from the processes started here."""
    for name in names:
        os.environ.pop(name, None)


def variable(name: str) -> str | None:
    """A variable that torchrun or the user may have set for a library, such as MASTER_ADDR."""
    return os.environ.get(name) or None
