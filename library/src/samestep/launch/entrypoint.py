"""Train as one node of a cluster: what a container executes, normally as its first process.

python -m samestep.launch.entrypoint [options of torchrun] [overrides of train.py]
python -m samestep.launch.entrypoint --nnodes=2 --nproc-per-node=1 --master-addr=node-0 cluster=k8s

Options that are not given are read from the variables that the cluster's controller sets, as
``samestep.node.cluster_environment`` lists them. Exit codes: 0 finished, 1 error, 2 invalid config,
137 killed (out of memory?), 143 stopped by SIGTERM.
"""

import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check
from samestep.hydra.front_end import name_run, topology_of
from samestep.hydra.project import project_folder
from samestep.launch import starts
from samestep.node import pid1, rendezvous
from samestep.node.cluster_environment import Node, read_node
from samestep.node.outcome import Outcome
from samestep.plugins import device_option
from samestep.ranks import environment, failure, process
from samestep.ranks.secrets import redact

DEFAULTS = {  # each line of stderr begins with its rank, and is kept in a file
    "PET_TEE": "2",
    "PET_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: ",
}


def main() -> int:
    """Train here; the arguments and the variables say as which node."""
    if sys.argv[1:2] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    exit_code = pid1.supervise()
    if exit_code is not None:  # this is the supervisor, and its child has ended
        return exit_code
    try:
        outcome = train_as_node(sys.argv[1:])
    except Exception as error:
        # Of an error that the user cannot mend the traceback goes to the log. The cause below is
        # one line, because Kubernetes shows it in the state of the pod.
        if not isinstance(error, (ConfigError, RunError)):
            print(redact(traceback.format_exc()), file=sys.stderr)
        outcome = Outcome(failure.exit_code(error), failure.message(error))
    return pid1.report(outcome.exit_code, outcome.cause)


def train_as_node(argv: Sequence[str]) -> Outcome:
    """Find the other nodes, and train with them."""
    node = read_node(DEFAULTS | environment.variables(), argv, "entrypoint")
    for word in node.program:
        if word.startswith("-"):
            raise ConfigError(f"{word}: options of torchrun come before the overrides")
    # An invalid configuration ends the node here, before it waits for the others.
    cfg = check(node.program)
    node = complete_node(node, cfg)
    # One node counts for all; elastic nodes have no numbers.
    if node.number in (0, None) and "backoff_limit" in cfg.cluster:
        starts.reject_endless(Path(cfg.run_dir), cfg.cluster.backoff_limit)
    node = rendezvous.resolve_endpoint(node)
    print(f"entrypoint: {node}, run {node.run_id}", flush=True)
    rendezvous.prepare_variables(node)
    environment.set_variable("RUN_ID", node.run_id)
    environment.set_variable(environment.ON_CLUSTER, "1")
    if node.options.shutdown_timeout is not None:
        environment.set_variable(environment.SHUTDOWN_S, str(node.options.shutdown_timeout))
    program = [str(project_folder() / "train.py"), *node.program]
    return rendezvous.launch(node, program)


def complete_node(node: Node, cfg: DictConfig) -> Node:
    """Add to ``node`` what neither options nor variables say, but the configuration does."""
    accelerator, devices, num_nodes = topology_of(cfg)
    # trainer.num_nodes=1 is the default, and leaves the number of nodes to the cluster.
    if num_nodes > 1 and not node.min_nodes <= num_nodes <= node.max_nodes:
        raise ConfigError(
            f"trainer.num_nodes={num_nodes}: --nnodes={node.options.nnodes} are started"
        )
    cfg.run_id = cfg.run_id or node.run_id
    # Each node would make up a name of its own, and train alone.
    if node.max_nodes > 1 and not cfg.run_id:
        raise ConfigError(
            "RUN_ID: is not set; several nodes need one name for the run, the same on each"
        )
    # The default, one device, leaves the number of processes to the GPUs that the cluster gives.
    num_gpus = device_option.num_gpus(accelerator)
    if devices not in (1, "auto"):
        num_gpus = int(devices)
    return replace(
        node,
        processes=node.processes or max(1, num_gpus),
        run_id=name_run(cfg),
        timeout_s=node.timeout_s or math.ceil(cfg.cluster.timeout_s),
    )


if __name__ == "__main__":
    process.run(main)
