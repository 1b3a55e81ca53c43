"""Start a script once for each rank, as torchrun does and with its options.

samestep run --nproc-per-node=2 script.py [arguments]
samestep run --nproc-per-node=2 -m module [arguments]

Options: --nproc-per-node=N, --nnodes=N, --node-rank=N, --master-addr=NODE, --max-restarts=N; all
of them: python -m torch.distributed.run --help

Exit codes: 0 finished, 1 error, 2 invalid arguments or configuration, 137 killed (out of memory?),
143 stopped by SIGTERM after saving.
"""

from collections.abc import Sequence

from samestep.command_line import Parser
from samestep.errors import ConfigError
from samestep.node import agent
from samestep.ranks import environment


def main(argv: Sequence[str]) -> int:
    """Start the ranks of this node with our agent, and return the exit code of all of them.

    Raises:
        ConfigError: if torchrun's options are wrong or contradict each other.
    """
    if argv[:1] in (["-h"], ["--help"]):  # behind the script they belong to the script
        print(__doc__)
        return 0
    from torch.distributed import run as torchrun

    parents = [torchrun.get_args_parser()]
    options = Parser("samestep run", __doc__, parents=parents, add_help=False).parse_args(argv)
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
