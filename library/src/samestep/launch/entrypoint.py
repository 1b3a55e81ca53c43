"""Train as one node of a cluster: what a container executes, normally as its first process.

python -m samestep.launch.entrypoint [options of torchrun] [overrides of train.py]
python -m samestep.launch.entrypoint --nnodes=2 --nproc-per-node=1 --master-addr=node-0 cluster=k8s

Options that are not given are read from the variables that the cluster's controller sets;
docs/clusters/entrypoint.md lists them. Exit codes: 0 finished, 1 error, 2 wrong usage or config,
137 killed (out of memory?), 143 stopped by SIGTERM.
"""

import sys
import traceback
from typing import TYPE_CHECKING

from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check
from samestep.hydra.folder import project_folder
from samestep.launch.cluster_environment import plan, split_arguments
from samestep.node import agent, pid1
from samestep.node.outcome import Outcome
from samestep.ranks import environment, failure, network, process
from samestep.ranks.secrets import redact

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

ETCD_ANSWERS_S = 5  # seconds for one answer; its client tries four times


def main() -> int:
    """Train here; the arguments and the variables say as which node."""
    if "--help" in sys.argv[1:2] or "-h" in sys.argv[1:2]:
        print(__doc__)
        return 0
    exit_code = pid1.supervise()
    if exit_code is not None:  # this is the supervisor, and its child has ended
        return exit_code
    outcome = train_as_node(sys.argv[1:])
    return pid1.report(outcome.exit_code, outcome.cause)


def train_as_node(argv: list[str]) -> Outcome:
    """Find the other nodes and train with them; every error becomes an exit code and a cause."""
    try:
        options, overrides = split_arguments(argv)
        cfg = check(overrides)
        description, config = plan(options, cfg)
        way = find_meeting_place(config)
        print(f"entrypoint: {description}{way}, run {config.run_id}", flush=True)
        environment.set_variable(environment.ON_CLUSTER, "1")  # for the ranks
        return agent.launch(config, [str(project_folder() / "train.py"), *overrides])
    except (ConfigError, RunError) as error:
        return Outcome(failure.exit_code(error), failure.message(error))
    except KeyboardInterrupt:
        return Outcome(process.EXIT_INTERRUPTED)
    except Exception as error:
        print(redact(traceback.format_exc()), file=sys.stderr)
        return Outcome(failure.EXIT_ERROR, f"{failure.PREFIX}{failure.message(error)}")


def find_meeting_place(config: "LaunchConfig") -> str:
    """Wait until this node can reach the place where the nodes meet, and complete ``config``.

    torchrun does not find out by itself under which address the other nodes reach this one, and
    whether it is this node that must open the store.

    Returns:
        Name, address and interface in words for the log; nothing for a single node.

    Raises:
        NetworkError: after the seconds that a node waits for the others.
    """
    if config.rdzv_endpoint == "localhost:0":
        config.local_addr = "localhost"
        return ""
    name, _, port = config.rdzv_endpoint.rpartition(":")
    name = name.strip("[]")
    timeout_s = int(config.rdzv_configs["timeout"])
    address, own_address = network.wait_for(
        name,
        timeout_s,
        lambda reason: print(f"entrypoint: waits for {name} ({reason})", flush=True),
        # Other meeting places are opened by a node, and torch waits for it.
        port=int(port) if config.rdzv_backend == "etcd-v2" else None,
    )
    config.local_addr = config.local_addr or own_address
    if config.rdzv_backend != "static":
        # A loopback address says nothing: it would be "here" on every node.
        is_here = address == own_address and not address.startswith("127.")
        complete_elastic_rendezvous(config, is_here=is_here)
    interface = network.interface_with(own_address)
    over = f" over {interface}" if interface else ""
    return f", meets at {name}:{port} ({address}{over})"


def complete_elastic_rendezvous(config: "LaunchConfig", *, is_here: bool) -> None:
    """Set what nodes that come and go need besides the address of the meeting place."""
    settings = config.rdzv_configs
    settings.setdefault("join_timeout", settings["timeout"])
    # An etcd answers at once or is lost. Another store may wait for its node to start.
    is_etcd = config.rdzv_backend == "etcd-v2"
    settings.setdefault("read_timeout", ETCD_ANSWERS_S if is_etcd else settings["timeout"])
    if config.rdzv_backend == "c10d" and is_here:
        settings.setdefault("is_host", "1")
    # If torchrun and the ranks shared one store, a node that comes later could not find it.
    environment.set_variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


if __name__ == "__main__":
    process.run(main)
