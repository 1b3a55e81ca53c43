"""What started this node, and how it takes part in the run: from options and variables.

Every cluster tells its containers in its own variables who they are. ``translate`` turns them into
the variables of torchrun (``PET_NNODES`` for ``--nnodes``), which its parser reads by itself;
options win over variables. ``plan`` completes and checks what the parser has found.
"""

import contextlib
import io
import re
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.hydra.name import name_run
from samestep.node import agent
from samestep.ranks import environment

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

FLAGS = {"--standalone", "--virtual-local-rank", "--virtual_local_rank"}  # options without a value
TORCHRUN_VARIABLES = {
    "WORLD_SIZE": "PET_NNODES",
    "RANK": "PET_NODE_RANK",
    "MASTER_ADDR": "PET_MASTER_ADDR",
    "MASTER_PORT": "PET_MASTER_PORT",
}
# torchrun gives its ranks these variables; those of the node would mislead other libraries.
VARIABLES_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
CONTROLLERS = {"RUNAI_": "Run:ai", "VC_": "Volcano"}  # by the prefix of their own variables
DEFAULTS = {"PET_MASTER_ADDR": "", "PET_NODE_RANK": "-1", "PET_NPROC_PER_NODE": "auto"}
SLURM_PORTS = range(10000, 30000)  # the kernel gives none of these to other programs
DEFAULT_PORTS = {"static": 29500, "c10d": 29400, "etcd": 2379, "etcd-v2": 2379}


def split_arguments(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line into torchrun's options and the overrides after them."""
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        has_value_inside = "=" in argv[index] or argv[index] in FLAGS
        index += 1 if has_value_inside else 2
    for argument in argv[index:]:
        if argument.startswith("-"):
            raise ConfigError(f"{argument}: options of torchrun come before the overrides")
    return argv[:index], argv[index:]


def translate(variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Find out what started this node, and what its variables mean for torchrun.

    ``WORLD_SIZE`` is the number of nodes, except under PyTorchJob (recognised by ``PET_NNODES``),
    where it is the number of ranks. ``RANK`` is the node's number.

    Returns:
        The name of the controller, and the variables of torchrun.
    """
    found = {name: value for name, value in variables.items() if name.startswith("PET_")}
    controller = name_controller(variables)
    if controller.startswith("Slurm"):
        found = translate_slurm(variables) | found
    if index := variables.get("JOB_COMPLETION_INDEX"):
        found.setdefault("PET_NODE_RANK", index)
    for name, torchrun_name in TORCHRUN_VARIABLES.items():
        if variables.get(name):
            found.setdefault(torchrun_name, variables[name])
    return controller, DEFAULTS | found


def translate_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun that those of a job step of Slurm mean.

    The nodes meet at the first node of the list, at a port that other jobs on it do not use.

    Raises:
        ConfigError: if srun did not start one task on each node.
    """
    nodes, tasks = variables["SLURM_STEP_NUM_NODES"], variables["SLURM_STEP_NUM_TASKS"]
    if nodes != tasks:
        raise ConfigError(
            f"SLURM_STEP_NUM_TASKS={tasks}: srun must start one task on each of the {nodes} nodes, "
            "which starts the ranks; use --ntasks-per-node=1"
        )
    job = int(variables["SLURM_JOB_ID"])
    # Of gpu[01-04,07],cpu3 the first node is gpu01.
    first_of_each = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"])
    return {
        "PET_NNODES": nodes,
        "PET_NODE_RANK": variables["SLURM_NODEID"],
        "PET_MASTER_ADDR": first_of_each.partition(",")[0],
        "PET_MASTER_PORT": str(SLURM_PORTS[job % len(SLURM_PORTS)]),
        "PET_RDZV_ID": f"{variables['SLURM_JOB_NAME']}-{job}",
    }


def name_controller(variables: Mapping[str, str]) -> str:
    """What set these variables, for people who read the log."""
    if "SLURM_STEP_NUM_TASKS" in variables:  # set by srun
        restarts = variables.get("SLURM_RESTART_COUNT", "0")
        return "Slurm" if restarts == "0" else f"Slurm (started again {restarts} times)"
    for prefix, name in CONTROLLERS.items():
        if any(variable.startswith(prefix) for variable in variables):
            return name
    is_indexed = bool(variables.get("JOB_COMPLETION_INDEX"))
    if "MASTER_ADDR" in variables and "WORLD_SIZE" in variables:
        return "PyTorchJob"
    if "PET_NNODES" in variables:
        return "TrainJob" if is_indexed else "variables of torchrun"
    return "Indexed Job" if is_indexed else "this machine"


def plan(options: list[str], cfg: DictConfig) -> tuple[str, "LaunchConfig"]:
    """Decide how many nodes take part, and which of them this one is.

    The variables that named this node are removed, so that its ranks do not inherit them;
    ``RUN_ID`` is set.

    Args:
        options: torchrun's options, such as ``--nnodes=2``.
        cfg: the checked configuration.

    Returns:
        A sentence for the log, and the configuration of torchrun's agent.

    Raises:
        ConfigError: if options and variables contradict each other, or do not suffice.
    """
    if environment.under_torchrun():
        raise ConfigError("TORCHELASTIC_RUN_ID: this is a rank of torchrun's; run train.py here")
    controller, found = translate(environment.variables())
    environment.unset_variables([*VARIABLES_OF_RANKS, *found])
    try:
        with environment.exported(found):
            arguments = parse(options)
        check_nodes(arguments, cfg)
        resolve_processes(arguments, cfg)
        place = resolve_rendezvous(arguments)
        resolve_run_id(arguments, cfg)
        config = agent_config(arguments, cfg)
    except ConfigError:
        raise
    except (ValueError, RuntimeError, AssertionError, OSError) as error:  # torchrun's refusals
        raise ConfigError(str(error)) from error
    if controller == "this machine" and options:
        controller = "options"
    num = config.nproc_per_node
    return f"{controller}, {place}, {num} process{'es' * (num > 1)} here", config


def parse(options: list[str]) -> Namespace:
    """Let torchrun's own parser read the options and the variables."""
    from torch.distributed.run import get_args_parser

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            arguments = get_args_parser().parse_args([*options, "train.py"])
    except SystemExit as error:
        if not error.code:
            raise  # --help
        reason = stderr.getvalue().partition(": error: ")[2].strip()
        raise ConfigError(reason) from None
    if arguments.training_script != "train.py" or arguments.training_script_args:
        raise ConfigError(f"{options[-1]}: write options as --name=value")
    if arguments.module or arguments.no_python or arguments.run_path or arguments.logs_specs:
        raise ConfigError(
            "--module, --no-python, --run-path and --logs-specs: are not for train.py"
        )
    return arguments


def check_nodes(arguments: Namespace, cfg: DictConfig) -> None:
    """Compare ``--nnodes`` with itself and with the configuration."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", arguments.nnodes):
        raise ConfigError(f"--nnodes={arguments.nnodes}: must be a number of nodes, or MIN:MAX")
    low, high = node_range(arguments)
    if low > high:
        raise ConfigError(f"--nnodes={arguments.nnodes}: MIN is larger than MAX")
    wanted = cfg.trainer.num_nodes
    if wanted > 1 and not low <= wanted <= high:
        raise ConfigError(f"trainer.num_nodes={wanted}: --nnodes={arguments.nnodes} are started")


def node_range(arguments: Namespace) -> tuple[int, int]:
    """The smallest and the largest number of nodes."""
    low, _, high = arguments.nnodes.partition(":")
    return int(low), int(high or low)


def resolve_processes(arguments: Namespace, cfg: DictConfig) -> None:
    """Decide how many processes this node starts, and share its processors among them."""
    if arguments.nproc_per_node == "auto":
        # torchrun itself would start one process for each processor of the host.
        devices = cfg.trainer.devices
        num = max(1, agent.num_gpus(cfg.trainer.accelerator)) if devices in {1, "auto"} else devices
        arguments.nproc_per_node = str(num)
    if not re.fullmatch(r"-?\d+", arguments.nproc_per_node):
        return  # a kind of device, which torchrun counts
    if int(arguments.nproc_per_node) < 1:
        raise ConfigError(f"--nproc-per-node={arguments.nproc_per_node}: must be at least 1")
    environment.limit_threads(int(arguments.nproc_per_node))


def resolve_rendezvous(arguments: Namespace) -> str:
    """Set where the nodes meet, and this node's number; return both in words for the log."""
    low, high = node_range(arguments)
    if arguments.rdzv_backend != "static" and not arguments.standalone:
        arguments.node_rank = 0  # nodes that come and go get their numbers when they meet
        if arguments.rdzv_backend == "etcd":
            # Controllers mean version 2 of etcd's interface; for torch "etcd" is an older client.
            arguments.rdzv_backend = "etcd-v2"
        arguments.rdzv_endpoint = endpoint_of(arguments)
        return f"one of {low} to {high} nodes" if low < high else f"one of {high} nodes"
    check_node_rank(arguments)
    if high == 1:  # needs no network
        arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"
        arguments.node_rank = 0
        return "alone"
    arguments.rdzv_endpoint = endpoint_of(arguments)
    return f"node {arguments.node_rank} of {high}"


def check_node_rank(arguments: Namespace) -> None:
    """Check the number of this node, for nodes that meet statically."""
    low, high = node_range(arguments)
    if max(0, arguments.node_rank) >= high:
        raise ConfigError(
            f"node {arguments.node_rank} of {high}: nodes count from 0; give --nnodes and "
            "--node-rank, or their variables, numbers that fit"
        )
    if low < high:
        raise ConfigError(
            f"--nnodes={low}:{high}: nodes that come and go need --rdzv-backend=c10d or etcd-v2"
        )
    if high > 1 and arguments.node_rank < 0:
        raise ConfigError("--node-rank: is missing; also PET_NODE_RANK, JOB_COMPLETION_INDEX")


def endpoint_of(arguments: Namespace) -> str:
    """Address and port of the place where the nodes meet."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    name = arguments.rdzv_endpoint or arguments.master_addr
    port = arguments.master_port or DEFAULT_PORTS.get(arguments.rdzv_backend, 29400)
    if not name:
        raise ConfigError("--master-addr: is missing; also PET_MASTER_ADDR, MASTER_ADDR")
    if ":" in name:
        name, port = parse_rendezvous_endpoint(name, port)
    if not 0 < port < 65536:
        raise ConfigError(f"{name}:{port}: the port must be from 1 to 65535")
    is_ipv6 = ":" in name
    return f"[{name}]:{port}" if is_ipv6 else f"{name}:{port}"


def resolve_run_id(arguments: Namespace, cfg: DictConfig) -> None:
    """Give the run one name, for torchrun and for ``train.py``."""
    if arguments.rdzv_id != "none" and not environment.run_id():
        environment.set_variable("RUN_ID", arguments.rdzv_id)
    _, high = node_range(arguments)
    if high > 1 and not (cfg.run_id or environment.run_id()):
        raise ConfigError(
            "RUN_ID: is not set; several nodes need one name for the run, the same on each"
        )
    arguments.rdzv_id = name_run(cfg)
    environment.set_variable("RUN_ID", arguments.rdzv_id)


def agent_config(arguments: Namespace, cfg: DictConfig) -> "LaunchConfig":
    """The configuration of torchrun's agent, with our defaults for its waits and its logs."""
    from torch.distributed.run import config_from_args

    if not re.search(r"(^|,)timeout=", arguments.rdzv_conf):
        timeout = f"timeout={cfg.cluster.timeout_s}"
        arguments.rdzv_conf = f"{timeout},{arguments.rdzv_conf}".rstrip(",")
    if arguments.tee == arguments.redirects == "0":
        arguments.tee = "2"  # each line of stderr begins with its rank, and is kept in a file
    arguments.log_line_prefix_template = arguments.log_line_prefix_template or "rank ${rank}: "
    config: LaunchConfig
    config, *_ = config_from_args(arguments)
    if not re.fullmatch(r"[1-9]\d*", str(config.rdzv_configs["timeout"])):
        raise ConfigError(
            f"--rdzv-conf={arguments.rdzv_conf}: timeout must be a whole number of seconds"
        )
    return config
