"""Train as one node of a cluster: what a container executes, normally as its first process.

python -m samestep.launch.entrypoint [options of torchrun] [overrides of train.py]
python -m samestep.launch.entrypoint --nnodes=2 --nproc-per-node=1 --master-addr=node-0 cluster=k8s

What no option says comes from the variables that the cluster's controller sets, which
docs/clusters/entrypoint.md lists. Exit codes: 0 finished, 1 error, 2 wrong usage or config,
137 killed (out of memory?), 143 stopped by SIGTERM.
"""

import sys
import time
import traceback
from typing import TYPE_CHECKING

from samestep.config.compose import check
from samestep.errors import ConfigError, RunError
from samestep.launch import agent, pid1
from samestep.launch.cluster_environment import plan, split
from samestep.ranks import environment

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig


def main() -> int:
    """Train here as the arguments and the variables say."""
    if "--help" in sys.argv[1:2] or "-h" in sys.argv[1:2]:
        print(__doc__)
        return 0
    exit_code = pid1.supervise()
    return node(sys.argv[1:]) if exit_code is None else exit_code


def node(argv: list[str]) -> int:
    """Find the other nodes, train with them, and leave the cause of an error where it is read."""
    try:
        options, overrides = split(argv)
        cfg = check(overrides)
        who, config = plan(options, cfg)
        config.local_addr, way = meet(config)
        print(f"entrypoint: {who}{way}, run {config.run_id}", flush=True)
        outcome = agent.launch(config, overrides)
    except ConfigError as error:
        outcome = agent.Outcome(2, f"error: {error}")
    except RunError as error:
        outcome = agent.Outcome(1, f"error: {error}")
    except KeyboardInterrupt:
        outcome = agent.Outcome(130)
    except Exception as error:
        traceback.print_exc()
        outcome = agent.Outcome(1, f"error: {type(error).__name__}: {error}")
    return pid1.leave(outcome.exit_code, outcome.cause)


def meet(config: "LaunchConfig") -> tuple[str | None, str]:
    """Wait until the place where the nodes meet has an address and there is a way to it.

    Returns:
        This node's own address on that way, for rendezvous that tells it to others; and the way.

    Raises:
        RunError: after the seconds that a node waits for the others.
    """
    conf = config.rdzv_configs
    if config.rdzv_endpoint == "localhost:0":
        return "localhost", ""
    name, port = config.rdzv_endpoint.rsplit(":", 1)
    name = name.strip("[]")
    address, own = wait_for(name, int(conf["timeout"]))
    interface = None if ":" in address else environment.interface_to(address)
    way = f", meets at {name}:{port} ({address}{f' over {interface}' if interface else ''})"
    if config.rdzv_backend != "static":
        for key in ("join_timeout", "read_timeout"):
            conf.setdefault(key, conf["timeout"])
        if config.rdzv_backend == "c10d" and address == own and not address.startswith("127."):
            conf.setdefault("is_host", "1")
        # One store for torchrun and the ranks would be one that newcomers cannot find.
        environment.set_variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return config.local_addr or own, way


def wait_for(name: str, timeout_s: int) -> tuple[str, str]:
    """The address of a node, and this node's own on the way there; a late one is waited for."""
    deadline, waits = time.monotonic() + timeout_s, False
    while True:
        try:
            address = environment.address_of(name)
            return address, environment.address_towards(address)
        except OSError as why:
            if time.monotonic() + 1 > deadline:
                raise RunError(
                    f"there is no way to {name} after {timeout_s} s ({why.strerror}): is that "
                    "node up, is the name that of a Service with publishNotReadyAddresses? "
                    "--rdzv-conf=timeout=SECONDS waits longer, else cluster.timeout_s"
                ) from why
            if not waits:
                print(f"entrypoint: waits for {name} ({why.strerror})", flush=True)
            waits = True
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
