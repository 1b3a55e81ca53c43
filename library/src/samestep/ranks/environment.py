"""The environment variables of this process: ranks, the name of the run, processors.

No other file reads or writes environment variables.
"""

import hashlib
import os
import platform
import re
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

ON_CLUSTER = "SAMESTEP_ON_CLUSTER"  # set by the entry point of a cluster's node


def under_torchrun() -> bool:
    """Whether torchrun started this process.

    A run id alone, left over in a shell, is not enough: no torchrun would be there to answer.
    """
    return {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys()


def _from_torchrun(name: str, alone: int) -> int:
    """What torchrun says in this variable; ``alone`` without torchrun."""
    return int(os.environ.get(name, alone)) if under_torchrun() else alone


rank = partial(_from_torchrun, "RANK", 0)  # of this process among all
world_size = partial(_from_torchrun, "WORLD_SIZE", 1)  # ranks on all nodes
local_rank = partial(_from_torchrun, "LOCAL_RANK", 0)  # of this process among those of its node
local_world_size = partial(_from_torchrun, "LOCAL_WORLD_SIZE", 1)  # ranks on this node
node_rank = partial(_from_torchrun, "GROUP_RANK", 0)  # of this node (torchrun agent) among all
num_nodes = partial(_from_torchrun, "GROUP_WORLD_SIZE", 1)


def use_srun_ranks() -> None:
    """Take the ranks that srun has started, one task each, for ranks of torchrun.

    Only where several tasks were started and nothing else has numbered them.
    """
    tasks, job = os.environ.get("SLURM_STEP_NUM_TASKS", "1"), os.environ.get("SLURM_JOB_ID", "0")
    if tasks == "1" or "RANK" in os.environ:
        return
    nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
    first, port = first_of_slurm(os.environ)
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        WORLD_SIZE=tasks,
        LOCAL_WORLD_SIZE=str(int(tasks) // nodes),
        GROUP_RANK=os.environ["SLURM_NODEID"],
        GROUP_WORLD_SIZE=str(nodes),
        MASTER_ADDR=os.environ.get("MASTER_ADDR", first),
        MASTER_PORT=os.environ.get("MASTER_PORT", port),
        TORCHELASTIC_RUN_ID=f"slurm-{job}",
    )


def first_of_slurm(variables: Mapping[str, str]) -> tuple[str, str]:
    """The first node of a job step, where its nodes meet, and a port that other jobs do not use."""
    # Of gpu[01-04,07],cpu3 the first node is gpu01.
    first, *_ = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"]).split(",")
    # The kernel gives none of these ports to other programs.
    return first, str(10000 + int(variables["SLURM_JOB_ID"]) % 20000)


def run_id() -> str | None:
    """The name this run was given: ``$RUN_ID``, otherwise torchrun's run id, otherwise None.

    Static rendezvous calls every run ``none``, which would put them all into one directory.
    """
    torchrun_id = os.environ.get("TORCHELASTIC_RUN_ID", "none") if under_torchrun() else "none"
    return os.environ.get("RUN_ID") or (None if torchrun_id == "none" else torchrun_id)


def new_run_id(*words: str) -> str:
    """Make up a name that no other run has, such as ``mnist-mlp-3f2a1b``.

    Under torchrun the name is derived from the agent process, so that all ranks of the agent, also
    restarted ones, get the same name.
    """
    token = secrets.token_bytes(8)
    agent = Path(f"/proc/{os.getppid()}/stat")
    if under_torchrun() and agent.exists():
        # The process's start time, in clock ticks since boot: process numbers are used again.
        started = agent.read_text().rpartition(")")[2].split()[19]
        token = f"{platform.node()} {os.getppid()} {started}".encode()
    return "-".join([*words, hashlib.sha256(token).hexdigest()[:6]]).lower()


def cpus_per_rank() -> int:
    """Number of processors that each rank of this node may use, at least 1.

    Torch counts the processors of the host, but a container is often limited to a share of them.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    allowed = float(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    cpu_max = Path("/sys/fs/cgroup/cpu.max")
    quota, period = cpu_max.read_text().split() if cpu_max.exists() else ("max", "100000")
    if quota != "max":
        allowed = min(allowed, int(quota) / int(period))
    return max(1, int(allowed / local_world_size()))


def limit_threads(num_processes: int = 1) -> None:
    """Share the processors among ``num_processes`` processes; call it before torch is imported.

    Waiting threads must sleep: spinning threads would take the processor from the other ranks.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus_per_rank() // num_processes)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def variable(name: str) -> str | None:
    """Value of a variable; None if it is unset or empty."""
    return os.environ.get(name) or None


def variables() -> dict[str, str]:
    """A copy of all variables."""
    return dict(os.environ)


def set_variable(name: str, value: str) -> None:
    """Set a variable for libraries that have no other option, and for processes started here."""
    os.environ[name] = value


def unset_variables(names: Iterable[str]) -> None:
    """Remove variables, so that processes started here do not inherit them."""
    for name in names:
        os.environ.pop(name, None)
