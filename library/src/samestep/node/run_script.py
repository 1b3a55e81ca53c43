"""Start a script once for each rank, as torchrun does and with its options.

samestep run --nproc-per-node=2 script.py [arguments]
samestep run --nproc-per-node=2 -m module [arguments]

--nproc-per-node=N    ranks of this node; auto: one for each GPU; default: 1
--nnodes=N            nodes, or MIN:MAX where they come and go; default: 1
--node-rank=N         number of this node, from 0; several nodes need it
--master-addr=NODE    name or address of node 0; several nodes need it
--master-port=PORT    port of node 0; default: 29500
--max-restarts=N      how often all ranks are restarted when one fails; default: 0
--shutdown-timeout=S  seconds that ranks have to save after a signal; default: 30

Options stand before the script; what follows it are its arguments. The other options are rare:
python -m torch.distributed.run --help

Exit codes: 0 finished, 1 error, 2 invalid arguments or configuration, 130 Ctrl-C, 137 killed (out
of memory?), 143 stopped by SIGTERM after saving.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep.command_line import fit_terminal
from samestep.errors import ConfigError
from samestep.node import agent, rendezvous
from samestep.node.cluster_environment import read_node
from samestep.plugins import device_option
from samestep.ranks import environment, interrupts

DEFAULTS = {"PET_NPROC_PER_NODE": "1"}


def main(argv: Sequence[str]) -> int:
    """Start the ranks of this node with our agent, and return the exit code of all of them."""
    # Only as the first argument: behind the script they belong to the script.
    if argv[:1] in (["-h"], ["--help"]):
        print(fit_terminal(__doc__))
        return 0
    interrupts.interrupt_at_once()
    node = read_node(DEFAULTS | environment.variables(), argv, "samestep run")
    if node.program in ([], ["-m"]):
        raise ConfigError("samestep run: names no script; write samestep run [options] script.py")
    # Otherwise each rank says so, and none of them which of our options stand behind the script.
    if node.program[0] != "-m" and not Path(node.program[0]).exists():
        raise ConfigError(f"samestep run: {node.program[0]}: there is no such file")
    node = replace(
        node,
        processes=node.processes or max(1, device_option.num_gpus("auto")),
        run_id=node.run_id or "none",  # as torchrun calls it
        timeout_s=node.timeout_s or 900,
    )
    node = rendezvous.resolve_endpoint(node)
    rendezvous.prepare_variables(node)
    return agent.report(rendezvous.launch(node, node.program))
