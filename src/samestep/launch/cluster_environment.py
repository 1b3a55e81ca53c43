"""Who started this node, and what torchrun must be told: options and variables in any dialect."""

import argparse
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.launch import agent
from samestep.ranks import environment
from samestep.run.name import name_run

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

FLAGS = {"--standalone", "--virtual-local-rank", "--virtual_local_rank"}  # options without a value
SAME = {
    "WORLD_SIZE": "PET_NNODES",
    "RANK": "PET_NODE_RANK",
    "MASTER_ADDR": "PET_MASTER_ADDR",
    "MASTER_PORT": "PET_MASTER_PORT",
}
NOT_FOR_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = {"RUNAI_": "Run:ai", "VC_": "Volcano"}  # of variables that name who set the others
MISSING = {"PET_MASTER_ADDR": "", "PET_NODE_RANK": "-1", "PET_NPROC_PER_NODE": "auto"}


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The options of torchrun, and what follows them: overrides."""
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        index += 1 if "=" in argv[index] or argv[index] in FLAGS else 2
    for argument in argv[index:]:
        if argument.startswith("-"):
            raise ConfigError(f"{argument}: options of torchrun come before the overrides")
    return argv[:index], argv[index:]


def translate(variables: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Who started this node, and what the variables of torchrun say for it.

    ``WORLD_SIZE`` counts nodes where the controller sets no ``PET_NNODES``; PyTorchJob does, and
    counts ranks. ``RANK`` is that of the node wherever no rank has been started yet.
    """
    found = {name: value for name, value in variables.items() if name.startswith("PET_")}
    index = variables.get("JOB_COMPLETION_INDEX")
    by_names = "MASTER_ADDR" in variables and "WORLD_SIZE" in variables
    who = "PyTorchJob" if by_names else "Indexed Job" if index else "this machine"
    if "PET_NNODES" in found and not by_names:
        who = "TrainJob" if index else "variables of torchrun"
    for prefix, name in PREFIXES.items():
        if any(variable.startswith(prefix) for variable in variables):
            who = name
    if index:
        found.setdefault("PET_NODE_RANK", index)
    for name, meaning in SAME.items():
        if variables.get(name):
            found.setdefault(meaning, variables[name])
    return who, MISSING | found


def plan(options: list[str], cfg: DictConfig) -> tuple[str, "LaunchConfig"]:
    """Who started this node, as which of how many, and the configuration of torchrun's agent.

    Raises:
        ConfigError: if options and variables contradict each other, or do not suffice.
    """
    if environment.under_torchrun():
        raise ConfigError("TORCHELASTIC_RUN_ID: this is a rank of torchrun's; run train.py here")
    who, found = translate(environment.variables())
    environment.unset_variables(NOT_FOR_RANKS)
    for name, value in found.items():
        environment.set_variable(name, value)
    from torch.distributed import run as torchrun  # reads the variables

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    try:
        parser = torchrun.get_args_parser()
        parser.error = refuse  # type: ignore[method-assign]  # instead of exiting
        args = parser.parse_args([*options, agent.TRAIN.name])
        if args.training_script != agent.TRAIN.name or args.training_script_args:
            refuse(f"{options[-1]}: write options as --name=value")
        if args.module or args.no_python or args.run_path or args.logs_specs:
            refuse("--module, --no-python, --run-path and --logs-specs: are not for train.py")
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", args.nnodes):
            refuse(f"--nnodes={args.nnodes}: must be a number of nodes, or MIN:MAX")
        low, high = torchrun.parse_min_max_nnodes(args.nnodes)
        if low > high:
            refuse(f"--nnodes={args.nnodes}: MIN is larger than MAX")
        if cfg.trainer.num_nodes > 1 and not low <= cfg.trainer.num_nodes <= high:
            refuse(f"trainer.num_nodes={cfg.trainer.num_nodes}: --nnodes={args.nnodes} are started")
        if args.nproc_per_node == "auto":  # torch would take every processor of the host
            devices = cfg.trainer.devices
            num = devices if devices not in {1, "auto"} else max(1, agent.num_gpus(cfg))
            args.nproc_per_node = str(num)
        if re.fullmatch(r"-?\d+", args.nproc_per_node):
            if int(args.nproc_per_node) < 1:
                refuse(f"--nproc-per-node={args.nproc_per_node}: must be at least 1")
            environment.limit_threads(int(args.nproc_per_node))
        where = place(args, low, high)
        who = "options" if who == "this machine" and options else who
        if args.rdzv_id != "none" and not environment.run_id():
            environment.set_variable("RUN_ID", args.rdzv_id)
        if high > 1 and not (cfg.run_id or environment.run_id()):
            refuse("RUN_ID: is not set; several nodes need one name for the run, the same on each")
        args.rdzv_id = name_run(cfg)
        if not re.search(r"(^|,)timeout=", args.rdzv_conf):
            args.rdzv_conf = f"timeout={cfg.cluster.timeout_s},{args.rdzv_conf}".rstrip(",")
        if args.tee == args.redirects == "0":
            args.tee = "2"  # the log in which agent.launch finds the cause of an error
        args.log_line_prefix_template = args.log_line_prefix_template or "rank ${rank}: "
        config, *_ = torchrun.config_from_args(args)
        if not re.fullmatch(r"[1-9]\d*", str(config.rdzv_configs["timeout"])):
            refuse(f"--rdzv-conf={args.rdzv_conf}: timeout must be a whole number of seconds")
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    environment.unset_variables([name for name in found if name.startswith("PET_")])
    environment.set_variable("RUN_ID", config.run_id)
    num = config.nproc_per_node
    return f"{who}, {where}, {num} process{'es' * (num > 1)} here", config


def place(args: argparse.Namespace, low: int, high: int) -> str:
    """Complete torchrun's options for the meeting of the nodes, and say which node this is."""
    if args.rdzv_backend == "static" or args.standalone:
        if not max(0, args.node_rank) < high:
            raise ConfigError(
                f"node {args.node_rank} of {high}: nodes count from 0; give --nnodes and "
                "--node-rank, or their variables, numbers that fit"
            )
        if high == 1:  # needs no network
            args.rdzv_backend, args.rdzv_endpoint, args.node_rank = "c10d", "localhost:0", 0
            return "alone"
        if low < high:
            raise ConfigError(
                f"--nnodes={low}:{high}: nodes that come and go need --rdzv-backend=c10d or etcd-v2"
            )
        if args.node_rank < 0:
            raise ConfigError("--node-rank: is missing; also PET_NODE_RANK, JOB_COMPLETION_INDEX")
        complete(args, 29500)
        return f"node {args.node_rank} of {high}"
    args.node_rank = 0  # the others count themselves
    if args.rdzv_backend == "etcd":  # ElasticJob's controller means etcd as such
        args.rdzv_backend = "etcd-v2"
    complete(args, 2379 if args.rdzv_backend.startswith("etcd") else 29400)
    return f"one of {low} to {high} nodes" if low < high else f"one of {high} nodes"


def complete(args: argparse.Namespace, default_port: int) -> None:
    """Give the place where the nodes meet an address and a port."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    port = args.master_port or default_port
    name = args.rdzv_endpoint or args.master_addr
    if not name:
        raise ConfigError("--master-addr: is missing; also PET_MASTER_ADDR, MASTER_ADDR")
    if ":" in name:
        name, port = parse_rendezvous_endpoint(name, port)
    if not 0 < port < 65536:
        raise ConfigError(f"{name}:{port}: the port must be from 1 to 65535")
    args.rdzv_endpoint = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
