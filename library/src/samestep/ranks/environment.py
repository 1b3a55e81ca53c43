"""The environment variables of this process: ranks, the name of the run, processors.

No other file reads or writes environment variables, so a test can replace them in one place.
"""

import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.ranks import process_table

PLUGIN = "SAMESTEP_PLUGIN"  # a module that is one more plug-in, see ``samestep.plugin``
VERIFY = "SAMESTEP_VERIFY"  # the plan of one program that `samestep verify` has started, as JSON
RUN_DIRS = "SAMESTEP_RUN_DIRS"  # what a Trainer that starts ranks hands on to them, as JSON
ON_CLUSTER = "SAMESTEP_ON_CLUSTER"  # set by the entry point of a cluster's node
SHUTDOWN_S = "SAMESTEP_SHUTDOWN_S"  # the same: seconds that the ranks have to save after SIGTERM
AGENT = "SAMESTEP_AGENT"  # the process id of our agent, for its ranks
TRAINJOB_SERVER = "KUBEFLOW_TRAINER_SERVER_URL"  # where a TrainJob takes reports of progress

_parent = 0  # the process that has started this program; 0 where none was noted


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    # A run id alone, left over in a shell, is not enough: no torchrun would be there to answer.
    return {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys()


def _from_torchrun(name: str, alone: int) -> int:
    """What torchrun says in this variable; ``alone`` without torchrun."""
    # Other programs set it too: RANK of a PyTorchJob is the number of a node.
    if not under_torchrun():
        return alone
    return int(os.environ.get(name, alone))


rank = partial(_from_torchrun, "RANK", 0)  # of this process among all
world_size = partial(_from_torchrun, "WORLD_SIZE", 1)  # ranks on all nodes
local_rank = partial(_from_torchrun, "LOCAL_RANK", 0)  # of this process among those of its node
local_world_size = partial(_from_torchrun, "LOCAL_WORLD_SIZE", 1)  # ranks on this node
node_rank = partial(_from_torchrun, "GROUP_RANK", 0)  # of this node (torchrun agent) among all
num_nodes = partial(_from_torchrun, "GROUP_WORLD_SIZE", 1)


def use_srun_ranks() -> None:
    """Treat the tasks of srun, if it has started several, as ranks that torchrun started."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    # A single task starts its ranks itself. Where something else has numbered the ranks, such as
    # torchrun in a job step, its numbers count.
    if tasks == "1" or "RANK" in os.environ:
        return
    nodes = int(os.environ["SLURM_STEP_NUM_NODES"])
    job = os.environ.get("SLURM_JOB_ID", "0")
    address, port = first_of_slurm(os.environ)
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", port)
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        WORLD_SIZE=tasks,
        LOCAL_WORLD_SIZE=str(int(tasks) // nodes),
        GROUP_RANK=os.environ["SLURM_NODEID"],
        GROUP_WORLD_SIZE=str(nodes),
        TORCHELASTIC_RUN_ID=f"slurm-{job}",
    )


def first_of_slurm(variables: Mapping[str, str]) -> tuple[str, str]:
    """The first node of a job step, where its nodes meet, and a port that other jobs do not use."""
    # Of gpu[01-04,07],cpu3 the first node is gpu01.
    nodes = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"])
    first, *_ = nodes.split(",")
    # The kernel gives none of these ports to other programs.
    port = 10000 + int(variables["SLURM_JOB_ID"]) % 20000
    return first, str(port)


def slurm_job() -> str | None:
    """The number of the job of Slurm that this process is part of; None if there is none."""
    return variable("SLURM_JOB_ID")


def run_id() -> str | None:
    """The name this run was given: ``$RUN_ID``, otherwise torchrun's run id, otherwise None."""
    given = variable("RUN_ID")
    if given or not under_torchrun():
        return given
    torchrun_id = os.environ["TORCHELASTIC_RUN_ID"]
    # Static rendezvous calls every run "none", which would put them all into one directory.
    if torchrun_id == "none":
        return None
    return torchrun_id


def new_run_id(*words: str) -> str:
    """Make up a name that no other run has, such as ``mnist-mlp-3f2a1b``.

    Under torchrun the name is derived from the agent process, so that all ranks of the agent, also
    restarted ones, get the same name.
    """
    token = secrets.token_bytes(8)
    # With the time at which it has started: process numbers are used again.
    started = process_table.start_of(os.getppid()) if under_torchrun() else None
    if started is not None:
        token = f"{platform.node()} {os.getppid()} {started}".encode()
    suffix = hashlib.sha256(token).hexdigest()[:6]
    return "-".join([*words, suffix]).lower()


def cpus_per_rank() -> int:
    """Number of processors that each rank of this node may use, at least 1."""
    return max(1, int(num_cpus() / local_world_size()))


def num_cpus() -> float:
    """Number of processors that this program may use."""
    allowed = float(os.cpu_count() or 1)
    # A task of Slurm may be bound to some of them.
    if hasattr(os, "sched_getaffinity"):
        allowed = float(len(os.sched_getaffinity(0)))
    # Torch counts the processors of the host, but a container is often limited to some of them.
    cpu_max = Path("/sys/fs/cgroup/cpu.max")
    if cpu_max.exists():
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            allowed = min(allowed, int(quota) / int(period))
    return allowed


def limit_threads(num_processes: int = 1) -> None:
    """Divide the processors among ``num_processes`` processes; call it before importing torch."""
    num_threads = max(1, cpus_per_rank() // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    # Waiting threads must sleep: spinning threads would take the processor from the other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def share_hash_seed() -> None:
    """Let the processes that are started here iterate over a set of texts in the same order."""
    # Python seeds the hashes of texts at random in each process: classes that are numbered in the
    # order of a set would have other numbers on each rank, and after each restart.
    os.environ.setdefault("PYTHONHASHSEED", "0")


def remember_parent() -> None:
    """Note which process has started this one; call it first, as that process may end soon."""
    global _parent
    _parent = os.getppid()


def parent() -> int:
    """The process that started this program; it may have ended since."""
    return _parent or os.getppid()


@contextmanager
def as_agent() -> Iterator[None]:
    """Be the agent of the processes that are started within the block."""
    set_variable(AGENT, str(os.getpid()))
    try:
        yield
    finally:
        unset_variables([AGENT])


def has_our_agent() -> bool:
    """Whether this process is a rank that our agent has started, not torchrun's own."""
    # A process that a rank starts inherits the variable.
    return variable(AGENT) == str(parent())


def verify_plan() -> dict[str, Any] | None:
    """The plan that `samestep verify` has for this program, see ``samestep.verify.plan``."""
    text = variable(VERIFY)
    if text is None:
        return None
    plan: dict[str, Any] = json.loads(text)
    return plan


def variable(name: str) -> str | None:
    """Value of a variable; None if it is unset or empty."""
    return os.environ.get(name) or None


def variables() -> dict[str, str]:
    """A copy of all variables."""
    return dict(os.environ)


def expand_home(path: str, name: str) -> str:
    """A path in which a leading ``~`` is the home directory, as in a shell.

    A shell leaves it alone within quotes, and in the middle of a word such as ``data.root=~/data``.

    Args:
        path: as the user typed it.
        name: of the option, for the message.

    Raises:
        ConfigError: if there is no such home directory.
    """
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        text = setting(name, path)
        raise ConfigError(f"{text}: has no home directory here; write the path out") from None


def set_variable(name: str, value: str) -> None:
    """Set a variable for libraries that have no other option, and for processes started here."""
    os.environ[name] = value


def unset_variables(names: Iterable[str]) -> None:
    """Remove variables, so that processes started here do not inherit them."""
    for name in names:
        os.environ.pop(name, None)
