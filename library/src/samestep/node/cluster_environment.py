"""Which node this is: from torchrun's options, and the variables of what started it.

Every cluster tells its containers in its own variables who they are. ``read_node`` reads them all;
docs/clusters/entrypoint.md has the table. It changes nothing, so its tests need no cluster.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.ranks import environment

CONTROLLERS = {  # by how the variables begin that they set; the first that fits
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
    """Whether the nodes meet at this one, which must open the store."""
    way: str = ""
    """Where the nodes meet, in words."""

    def __str__(self) -> str:
        """For the log: ``Indexed Job, node 1 of 2, 2 processes here, meets at ...``."""
        is_fixed = self.min_nodes == self.max_nodes
        nodes = f"{self.max_nodes}" if is_fixed else f"{self.min_nodes} to {self.max_nodes}"
        place = f"one of {nodes} nodes" if self.number is None else f"node {self.number} of {nodes}"
        if self.endpoint == ALONE:
            place = "alone"
        plural = "es" if self.processes > 1 else ""
        return f"{self.controller}, {place}, {self.processes} process{plural} here{self.way}"


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

    ``argv`` has torchrun's options, and the words that come after them.
    """
    from torch.distributed.run import determine_local_world_size

    if {"TORCHELASTIC_RUN_ID", "RANK"} <= variables.keys():
        raise ConfigError("TORCHELASTIC_RUN_ID: this is a rank of torchrun's; run the script here")
    given = parse(argv, read_variables(variables), command)
    words = [given.training_script, *given.training_script_args][:-1]
    low, high, number = read_numbers(given)
    is_alone = number is not None and high == 1
    # Controllers mean version 2 of etcd's interface; for torch "etcd" is an older client.
    backend = "etcd-v2" if given.rdzv_backend == "etcd" else given.rdzv_backend
    # For torchrun, "auto" is the number of processors if there are no GPUs.
    is_auto = given.nproc_per_node == "auto"
    processes = 0 if is_auto else determine_local_world_size(given.nproc_per_node)
    if processes < 1 and not is_auto:
        raise ConfigError(f"--nproc-per-node={given.nproc_per_node}: must be at least 1")
    timeout = re.search(r"(?:^|,)timeout=([^,]*)", given.rdzv_conf)
    if timeout and not re.fullmatch(r"[1-9]\d*", timeout[1]):
        raise ConfigError(f"--rdzv-conf={given.rdzv_conf}: timeout must be whole seconds")
    return Node(
        controller=name_controller(variables, has_options=len(argv) > len(words)),
        min_nodes=low,
        max_nodes=high,
        number=number,
        processes=processes,
        backend="c10d" if is_alone else backend,
        endpoint=ALONE if is_alone else endpoint_of(given, PORTS.get(backend, 29400)),
        run_id=variables.get("RUN_ID") or ("" if given.rdzv_id == "none" else given.rdzv_id),
        timeout_s=int(timeout[1]) if timeout else 0,
        options=given,
        program=["-m", *words] if given.module else words,
    )


def name_controller(variables: Mapping[str, str], *, has_options: bool) -> str:
    """What started this node, for people who read the log."""
    for beginnings, name in CONTROLLERS.items():
        if all(any(v.startswith(beginning) for v in variables) for beginning in beginnings):
            restarts = variables.get("SLURM_RESTART_COUNT", "0")
            return name if restarts == "0" else f"{name} (started again {restarts} times)"
    return "options" if has_options else "this machine"


def read_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """What the variables say, by the names that torchrun's parser gives its options.

    ``WORLD_SIZE`` is the number of nodes. Where it is the number of ranks, as under PyTorchJob,
    there is ``PET_NNODES`` too.
    """
    found = {option: variables[name] for name, option in OPTIONS.items() if variables.get(name)}
    if "SLURM_STEP_NUM_TASKS" in variables:  # set by srun
        nodes, tasks = variables["SLURM_STEP_NUM_NODES"], variables["SLURM_STEP_NUM_TASKS"]
        if nodes != tasks:
            raise ConfigError(
                f"SLURM_STEP_NUM_TASKS={tasks}: srun must start one task on each of the {nodes} "
                "nodes, which starts the ranks; use --ntasks-per-node=1"
            )
        found["nnodes"], found["node_rank"] = nodes, variables["SLURM_NODEID"]
        found["master_addr"], found["master_port"] = environment.first_of_slurm(variables)
        found["rdzv_id"] = f"{variables['SLURM_JOB_NAME']}-{variables['SLURM_JOB_ID']}"
    of_torchrun = [name for name in variables if name.startswith("PET_")]
    return found | {name.removeprefix("PET_").lower(): variables[name] for name in of_torchrun}


def parse(argv: Sequence[str], found: dict[str, str], command: str) -> Namespace:
    """Let torchrun's own parser read the arguments; what they lack is as ``found``, or default."""
    from torch.distributed.run import get_args_parser

    parser = Parser(command, None, parents=[get_args_parser()], add_help=False)
    for name, value in (DEFAULTS | found).items():
        is_flag = isinstance(parser.get_default(name), bool)
        parser.set_defaults(**{name: value != "0" if is_flag else value})
    # torchrun's parser needs a script, and the entry point has none. read_node takes it off again.
    given = parser.parse_args([*argv, "(end)"])
    if given.no_python or given.run_path:
        raise ConfigError("--no-python, --run-path: are not supported; the ranks run in Python")
    return given


def read_numbers(given: Namespace) -> tuple[int, int, int | None]:
    """The smallest and the largest number of nodes, and the number of this one if it is fixed."""
    found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", given.nnodes)
    low, high = map(int, (found[1], found[2] or found[1])) if found else (1, 0)
    if low > high:
        raise ConfigError(f"--nnodes={given.nnodes}: must be a number of nodes, or MIN:MAX")
    if given.rdzv_backend != "static" and not given.standalone:
        return low, high, None
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
    """Address and port of the place where the nodes meet."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    name, port = given.rdzv_endpoint or given.master_addr, given.master_port or default_port
    if not name:
        raise ConfigError("--master-addr: is missing; also PET_MASTER_ADDR, MASTER_ADDR")
    if ":" in name:
        name, port = parse_rendezvous_endpoint(name, port)
    if not 0 < port < 65536:
        raise ConfigError(f"{name}:{port}: the port must be from 1 to 65535")
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
