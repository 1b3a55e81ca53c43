"""Where the nodes of a run meet, and what torchrun's agent must know to get there."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from samestep.node import agent
from samestep.node.cluster_environment import ALONE, Node, torchrun_errors
from samestep.node.outcome import Outcome
from samestep.ranks import environment, network

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# torchrun gives its ranks these variables; those of the node would mislead other libraries.
VARIABLES_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ETCD_ANSWERS_S = 5  # seconds for one answer; its client tries four times


def resolve_endpoint(node: Node) -> Node:
    """Wait until this node can reach the endpoint where the nodes meet.

    The returned node knows its own address, and whether the endpoint is on it. torchrun finds out
    neither.
    """
    if node.endpoint == ALONE:
        return replace(node, own_address="localhost")
    name, _, port = node.endpoint.rpartition(":")
    name = name.strip("[]")
    # An etcd must answer now. Any other store is opened by a node, and torch waits for it.
    port_to_reach = int(port) if node.backend == "etcd-v2" else None
    address, own_address = network.wait_for(
        name, node.timeout_s, lambda reason: report_waiting(name, reason), port=port_to_reach
    )
    # A loopback address says nothing: it would be "here" on every node.
    is_here = address == own_address and not address.startswith("127.")
    interface = network.interface_with(own_address)
    over = f" over {interface}" if interface else ""
    route = f", meets at {name}:{port} ({address}{over})"
    return replace(node, own_address=own_address, is_here=is_here, route=route)


def report_waiting(name: str, reason: str) -> None:
    """Print that this node waits for another one, which may start minutes later."""
    print(f"entrypoint: waits for {name} ({reason})", flush=True)


def prepare_variables(node: Node) -> None:
    """Remove the variables of the node that its ranks must not inherit, and set what they need."""
    of_torchrun = [name for name in environment.variables() if name.startswith("PET_")]
    environment.unset_variables([*VARIABLES_OF_RANKS, *of_torchrun])
    environment.limit_threads(node.processes)
    if node.number is None:
        # If torchrun and the ranks shared one store, a node that comes later could not find it.
        environment.set_variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def launch(node: Node, program: Sequence[str]) -> Outcome:
    """Meet the other nodes, and run a program in the processes of this one; see ``agent.launch``.

    Call ``prepare_variables`` before: torchrun reads them.
    """
    config = launch_config(node)
    if node.backend != "etcd-v2":
        return agent.launch(config, program)
    # torch's own handler ends every node when etcd does not answer for a moment.
    from samestep.node.etcd_rendezvous import EtcdRendezvous, is_loss  # needs the extra for etcd

    return agent.launch(config, program, agent.Rendezvous(EtcdRendezvous, is_loss))


@torchrun_errors()
def launch_config(node: Node) -> "LaunchConfig":
    """Build what torchrun's agent must know."""
    from torch.distributed.run import config_from_args

    found = {
        "nnodes": f"{node.min_nodes}:{node.max_nodes}",
        "nproc_per_node": str(node.processes),
        "node_rank": node.number or 0,
        "rdzv_backend": node.backend,
        "rdzv_endpoint": node.endpoint,
        "rdzv_id": node.run_id,
        "rdzv_conf": ",".join(rendezvous_settings(node)),
        "local_addr": node.options.local_addr or node.own_address,
    }
    config: LaunchConfig
    config, *_ = config_from_args(Namespace(**(vars(node.options) | found)))
    if not hasattr(config, "shutdown_timeout"):  # before torch 2.15
        config.shutdown_timeout = node.options.shutdown_timeout
    return config


def rendezvous_settings(node: Node) -> list[str]:
    """The settings of torchrun's rendezvous; of two with one name the last counts."""
    settings = [f"timeout={node.timeout_s}"]
    if node.number is None:
        answers_s = node.timeout_s
        if node.backend == "etcd-v2":
            # An etcd answers at once or is lost. Another store may wait for its node to start.
            answers_s = ETCD_ANSWERS_S
        settings += [f"join_timeout={node.timeout_s}", f"read_timeout={answers_s}"]
    if node.backend == "c10d" and node.is_here:
        # torch compares names of hosts only, and would wait for a store that it must open.
        settings.append("is_host=1")
    if node.options.rdzv_conf:
        settings.append(node.options.rdzv_conf)
    return settings
