"""The command ``samestep``.

samestep run [options of torchrun] script.py [arguments]
samestep run --nproc-per-node=2 script.py

Starts the script once for each rank, as torchrun does and with its options: --nproc-per-node=N,
--nnodes=N, --node-rank=N, --master-addr=NODE, --max-restarts=N, -m module; all of them:
python -m torch.distributed.run --help

Exit codes: 0 finished, 1 error, 2 wrong usage or configuration, 137 killed (out of memory?),
143 stopped by SIGTERM after saving.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

from samestep.errors import ConfigError
from samestep.node import agent
from samestep.ranks import environment, failure, process


def main() -> NoReturn:
    """Do what the command line says, and exit."""
    process.run(command)


def command() -> int:
    """The command line as a function that returns an exit code. Help imports no torch."""
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help") or argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    try:
        if name != "run":
            raise ConfigError(f"samestep {name}: there is no such command; there is run")
        return run(argv)
    except ConfigError as error:
        return failure.report(error)


def run(argv: Sequence[str]) -> int:
    """Start the ranks of this node with our agent, and return the exit code of all of them.

    Raises:
        ConfigError: if torchrun's options contradict each other.
    """
    from torch.distributed import run as torchrun

    options = torchrun.get_args_parser().parse_args([*argv])
    if options.no_python:
        raise ConfigError("--no-python: is not supported: samestep.Trainer runs in Python")
    is_alone = options.rdzv_backend == "static" and options.nnodes in ("1", "1:1")
    if options.standalone or (is_alone and not options.rdzv_endpoint and not options.master_port):
        # As torchrun does: any free port.
        options.rdzv_backend, options.rdzv_endpoint = "c10d", "localhost:0"
        options.local_addr = options.local_addr or "localhost"
    options.master_port = options.master_port or 29500
    try:
        config, _, _ = torchrun.config_from_args(options)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"samestep run: {error}") from error
    environment.limit_threads(config.nproc_per_node)
    module = ["-m"] if options.module else []
    return agent.report(
        agent.launch(config, [*module, options.training_script, *options.training_script_args])
    )
