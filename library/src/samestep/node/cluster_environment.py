"""Which node this is: from torchrun's options, and the variables of the cluster that started it.

Every cluster numbers its containers in variables of its own. ``read_node`` reads them all.
It changes nothing, so its tests need no cluster.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks import environment

CONTROLLERS = {  # by the first letters of the variables that they set; the first that fits
    ("SLURM_STEP_NUM_TASKS",): "Slurm",
    ("RUNAI_",): "Run:ai",
    ("VC_",): "Volcano",
    ("MASTER_ADDR", "WORLD_SIZE"): "PyTorchJob",
    ("PET_NNODES", "JOB_COMPLETION_INDEX"): "TrainJob",
    ("PET_NNODES",): "variables of torchrun",
    ("JOB_COMPLETION_INDEX",): "Indexed Job",
}
OPTIONS = {  # of torchrun, by the variables that mean the same; a later variable wins
    "WORLD_SIZE": "nnodes",
    "RANK": "node_rank",
    "JOB_COMPLETION_INDEX": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
}
DEFAULTS = {"master_addr": "", "node_rank": "-1", "nproc_per_node": "auto"}
PORTS = {"static": 29500, "etcd-v2": 2379}  # others: 29400
NODES_RULE = "must be a number of nodes, or MIN:MAX"
ALONE = "localhost:0"  # a single node needs no network, and takes any free port


@dataclass(frozen=True)
class Node:
    """One node of a run: who it is, where it meets the others, and what it starts."""

    controller: str
    min_nodes: int
    max_nodes: int
    number: int | None
    """From 0; None where the nodes get their numbers when they meet."""
    processes: int
    """Ranks of this node; 0 leaves it to the configuration."""
    backend: str
    endpoint: str
    run_id: str
    """Empty leaves it to the configuration."""
    timeout_s: int
    """Seconds that the nodes wait for each other; 0 leaves it to the configuration."""
    options: Namespace
    """All options as torchrun's parser reads them: restarts, logs, signals."""
    program: list[str]
    """The words after the options: a script, ``-m`` and a module, or overrides."""
    own_address: str = ""
    """By which the other nodes reach this one."""
    is_here: bool = False
    """Whether the endpoint is on this node, which must open the store."""
    route: str = ""
    """How this node reaches the endpoint, for the log."""

    def __str__(self) -> str:
        """For the log: ``Indexed Job, node 1 of 2, 2 processes here, meets at ...``."""
        processes = f"{self.processes} process here"
        if self.processes > 1:
            processes = f"{self.processes} processes here"
        return f"{self.controller}, {self._describe_place()}, {processes}{self.route}"

    def _describe_place(self) -> str:
        """Which node this is among all: ``node 1 of 2``, ``one of 1 to 4 nodes`` or ``alone``."""
        if self.endpoint == ALONE:
            return "alone"
        nodes = str(self.max_nodes)
        if self.min_nodes < self.max_nodes:
            nodes = f"{self.min_nodes} to {self.max_nodes}"
        if self.number is None:
            return f"one of {nodes} nodes"
        return f"node {self.number} of {nodes}"


@contextmanager
def torchrun_errors() -> Iterator[None]:
    """Make a ConfigError of what torchrun's own code rejects."""
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error


@torchrun_errors()
def read_node(variables: Mapping[str, str], argv: Sequence[str], command: str) -> Node:
    """Find out which node this is. Options win over torchrun's variables, and these over others.

    Args:
        variables: the environment variables.
        argv: torchrun's options, and the words that come after them.
        command: its name is in the error messages.
    """
    if {"TORCHELASTIC_RUN_ID", "RANK"} <= variables.keys():
        raise ConfigError("TORCHELASTIC_RUN_ID: this is a rank of torchrun's; run the script here")
    given = parse(argv, read_variables(variables), command)
    words = [given.training_script, *given.training_script_args][:-1]
    program = ["-m", *words] if given.module else words
    low, high, number = read_numbers(given)
    backend = given.rdzv_backend
    if backend == "etcd":
        # Controllers mean version 2 of etcd's interface; for torch "etcd" is an older client.
        backend = "etcd-v2"
    endpoint = ""
    if number is not None and high == 1:
        # A single node needs no address: it opens its own store.
        backend, endpoint = "c10d", ALONE
    return Node(
        controller=name_controller(variables, has_options=len(argv) > len(words)),
        min_nodes=low,
        max_nodes=high,
        number=number,
        processes=read_processes(given),
        backend=backend,
        endpoint=endpoint or endpoint_of(given, PORTS.get(backend, 29400)),
        run_id=read_run_id(variables, given),
        timeout_s=read_timeout(given),
        options=given,
        program=program,
    )


def name_controller(variables: Mapping[str, str], *, has_options: bool) -> str:
    """Name what started this node, for the log."""
    for prefixes, name in CONTROLLERS.items():
        if not all(has_prefix(variables, prefix) for prefix in prefixes):
            continue
        restarts = variables.get("SLURM_RESTART_COUNT", "0")
        if restarts != "0":
            return f"{name} (started again {restarts} times)"
        return name
    return "options" if has_options else "this machine"


def has_prefix(variables: Mapping[str, str], prefix: str) -> bool:
    """Whether the name of any variable begins with ``prefix``."""
    return any(name.startswith(prefix) for name in variables)


def read_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Read what the variables say, by the names that torchrun's parser gives its options."""
    found = {}
    for name, option in OPTIONS.items():
        # ``WORLD_SIZE`` is the number of nodes. Where it is the number of ranks, as under
        # PyTorchJob, there is ``PET_NNODES`` too, which wins below.
        if variables.get(name):
            found[option] = variables[name]
    if "SLURM_STEP_NUM_TASKS" in variables:  # set by srun
        found |= read_slurm(variables)
    for name, value in variables.items():
        if name.startswith("PET_"):
            found[name.removeprefix("PET_").lower()] = value
    return found


def read_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Read what srun says about a job step that has one task on each node."""
    nodes, tasks = variables["SLURM_STEP_NUM_NODES"], variables["SLURM_STEP_NUM_TASKS"]
    if nodes != tasks:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={tasks}: srun must start one task on each of the {nodes} "
            "nodes, which starts the ranks; use --ntasks-per-node=1"
        )
    address, port = environment.first_of_slurm(variables)
    return {
        "nnodes": nodes,
        "node_rank": variables["SLURM_NODEID"],
        "master_addr": address,
        "master_port": port,
        "rdzv_id": f"{variables['SLURM_JOB_NAME']}-{variables['SLURM_JOB_ID']}",
    }


def parse(argv: Sequence[str], found: dict[str, str], command: str) -> Namespace:
    """Let torchrun's own parser read the arguments; what they lack is as ``found``, or default."""
    from torch.distributed.argparse_util import env
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import get_args_parser

    parser = Parser(command, None, parents=[get_args_parser()], add_help=False)
    if not hasattr(LaunchConfig, "shutdown_timeout"):  # before torch 2.15
        name = "--shutdown-timeout"
        parser.add_argument(name, action=env, type=int, help="seconds to save after a signal")
    for name, value in (DEFAULTS | found).items():
        default: str | bool = value
        # A variable for a flag has 0 or 1. As a text both would be true.
        if isinstance(parser.get_default(name), bool):
            default = value != "0"
        parser.set_defaults(**{name: default})
    # torchrun's parser needs a script, and the entry point has none. read_node takes it off again.
    given = parser.parse_args([*argv, "(end)"])
    if given.no_python or given.run_path:
        raise ConfigError("--no-python, --run-path: are not supported; the ranks run in Python")
    return given


def read_processes(given: Namespace) -> int:
    """Return the number of ranks of this node; 0 if the configuration decides."""
    from torch.distributed.run import determine_local_world_size

    # For torchrun, "auto" is the number of processors if there are no GPUs.
    if given.nproc_per_node == "auto":
        return 0
    try:
        processes: int = determine_local_world_size(given.nproc_per_node)
    except ValueError as error:
        # torch says why `gpu` cannot be, but of other words not what it would take.
        if not str(error).startswith("Unsupported"):
            raise
        raise ConfigError(
            f"--nproc-per-node={given.nproc_per_node}: must be a whole number, auto, cpu or gpu"
        ) from error
    if processes < 1:
        raise ConfigError(f"--nproc-per-node={given.nproc_per_node}: must be at least 1")
    return processes


def read_run_id(variables: Mapping[str, str], given: Namespace) -> str:
    """Return the name of the run; an empty text if the configuration decides."""
    if variables.get("RUN_ID"):
        return variables["RUN_ID"]
    # torchrun's parser calls every run without a name "none".
    return "" if given.rdzv_id == "none" else str(given.rdzv_id)


def read_timeout(given: Namespace) -> int:
    """Return the seconds that the nodes wait for each other; 0 if the configuration decides."""
    timeout = re.search(r"(?:^|,)timeout=([^,]*)", given.rdzv_conf)
    if timeout is None:
        return 0
    if not re.fullmatch(r"[1-9]\d*", timeout[1]):
        raise ConfigError(f"--rdzv-conf={given.rdzv_conf}: timeout must be whole seconds")
    return int(timeout[1])


def read_numbers(given: Namespace) -> tuple[int, int, int | None]:
    """The smallest and the largest number of nodes, and the number of this one if it is fixed."""
    found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", given.nnodes)
    if found is None:
        raise ConfigError(f"--nnodes={given.nnodes}: {NODES_RULE}")
    low, high = int(found[1]), int(found[2] or found[1])
    if low > high:
        raise ConfigError(f"--nnodes={given.nnodes}: {NODES_RULE}")
    is_static = given.rdzv_backend == "static" or given.standalone
    if not is_static:
        # The nodes get their numbers when they meet.
        return low, high, None
    # torchrun's default is -1. A single node needs no number.
    number = max(0, given.node_rank)
    if number >= high:
        raise ConfigError(
            f"node {number} of {high}: nodes count from 0; give --nnodes and --node-rank, or "
            "their variables, numbers that fit"
        )
    if low < high:
        raise ConfigError(
            f"--nnodes={low}:{high}: nodes that come and go need --rdzv-backend=c10d or etcd-v2"
        )
    if high > 1 and given.node_rank < 0:
        raise ConfigError("--node-rank: is missing; also PET_NODE_RANK, JOB_COMPLETION_INDEX")
    return low, high, number


def endpoint_of(given: Namespace, default_port: int) -> str:
    """Return the address and port at which the nodes meet."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    name = given.rdzv_endpoint or given.master_addr
    port = given.master_port or default_port
    if not name:
        raise ConfigError("--master-addr: is missing; also PET_MASTER_ADDR, MASTER_ADDR")
    if ":" in name:
        name, port = parse_rendezvous_endpoint(name, port)
    if not 0 < port < 65536:
        raise ConfigError(f"{name}:{port}: the port must be from 1 to 65535")
    if ":" in name:
        # An IPv6 address: without brackets its last part would be the port.
        return f"[{name}]:{port}"
    return f"{name}:{port}"
