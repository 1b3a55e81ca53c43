"""What the surroundings say: ranks, the name of the run, processors, secrets.

The only file of the project that reads or writes environment variables.
"""

import hashlib
import os
import platform
import re
import secrets
from pathlib import Path

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


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


def limit_threads(num_processes: int = 1) -> None:
    """Share the processors among the processes of this one; call before torch is imported.

    Threads that wait must sleep: spinning ones take the processor from the other ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus_per_rank() // num_processes)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_variable(name: str, value: str) -> None:
    """Set a variable for the processes started here, or for a library that has no other way."""
    os.environ[name] = value


def redact(text: str) -> str:
    """``text`` with the value of every secret environment variable replaced by ``***``."""
    values = {v for name, v in os.environ.items() if _SECRET_NAME.search(name) and len(v) >= 8}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def variable(name: str) -> str | None:
    """A variable that torchrun or the user may have set for a library, such as MASTER_ADDR."""
    return os.environ.get(name) or None
