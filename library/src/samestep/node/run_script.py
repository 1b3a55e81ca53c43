"""Start a script once for each rank, as torchrun does and with its options.

samestep run --nproc-per-node=2 script.py [arguments]
samestep run --nproc-per-node=2 -m module [arguments]

Options: --nproc-per-node=N, --nnodes=N, --node-rank=N, --master-addr=NODE, --max-restarts=N; all
of them: python -m torch.distributed.run --help

Exit codes: 0 finished, 1 error, 2 invalid arguments or configuration, 137 killed (out of memory?),
143 stopped by SIGTERM after saving.
"""

from collections.abc import Sequence
from dataclasses import replace

from samestep.errors import ConfigError
from samestep.node import agent, device_option, rendezvous
from samestep.node.cluster_environment import read_node
from samestep.ranks import environment

DEFAULTS = {"PET_NPROC_PER_NODE": "1"}


def main(argv: Sequence[str]) -> int:
    """Start the ranks of this node with our agent, and return the exit code of all of them."""
    # Only as the first argument: behind the script they belong to the script.
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    node = read_node(DEFAULTS | environment.variables(), argv, "samestep run")
    if node.program in ([], ["-m"]):
        raise ConfigError("samestep run: names no script; write samestep run [options] script.py")
    node = replace(
        node,
        processes=node.processes or max(1, device_option.num_gpus("auto")),
        run_id=node.run_id or "none",  # as torchrun calls it
        timeout_s=node.timeout_s or 900,
    )
    node = rendezvous.resolve_endpoint(node)
    rendezvous.prepare_variables(node)
    return agent.report(rendezvous.launch(node, node.program))
