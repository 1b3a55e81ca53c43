"""Several processes on this machine, started and watched by torchrun's own agent."""

import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from samestep.node import torch_agent
from samestep.node.hung_ranks import HungRanks
from samestep.node.outcome import Outcome, is_final, outcome_of, reason_of
from samestep.node.requests import Requests
from samestep.ranks import environment, failure, heartbeat, interrupts, output
from samestep.ranks.failure import EXIT_ERROR, PREFIX
from samestep.ranks.secrets import redact

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.launcher.api import LaunchConfig


def main() -> NoReturn:
    """Be the agent that the process of a Trainer has become, see ``samestep.plugins.starting``."""
    interrupts.interrupt_at_once()
    failure.ErrorHook.install()
    output.make_streams_safe()
    count, run_id, *program = sys.argv[1:]
    sys.exit(start(program, int(count), run_id=run_id))


def start(program: Sequence[str], num_processes: int, *, run_id: str) -> int:
    """Run a program in several processes on this machine, and return their exit code."""
    environment.limit_threads(num_processes)
    environment.set_variable("RUN_ID", run_id)
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    return report(launch(config, program))


def report(outcome: Outcome) -> int:
    """Print why the processes failed, unless a rank has printed it; return the exit code."""
    if outcome.cause and not outcome.is_printed:
        print(f"{PREFIX}{redact(outcome.cause.removeprefix(PREFIX))}", file=sys.stderr)
    return outcome.exit_code


class Rendezvous(NamedTuple):
    """How nodes meet: by one of torch's handlers, unless a caller of ``launch`` has another one."""

    make: "Callable[[RendezvousParameters], RendezvousHandler]"
    is_loss: Callable[[Exception], bool]
    """Whether an error means that the nodes cannot meet now, but may meet later."""


def make_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
    """Make the handler of torch for these parameters."""
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(parameters)


SHUTDOWN_TIMEOUT_S = 30
"""torchrun's own, of 2.15."""
NEWER_OPTIONS = (
    "event_log_handler", "numa_options", "duplicate_stdout_filters", "duplicate_stderr_filters",
    "virtual_local_rank",
)  # fmt: skip
"""Options of torchrun that torch 2.6 lacks; 2.8 has the first."""

OF_TORCH = Rendezvous(make_handler, is_loss=lambda error: False)


def launch(
    config: "LaunchConfig", program: Sequence[str], rendezvous: Rendezvous = OF_TORCH
) -> Outcome:
    """Start the processes of this node, watch them, and restart them if they fail.

    They are restarted ``config.max_restarts`` times, but not if their configuration is wrong.
    Processes that SIGTERM stopped are restarted only where nodes may come and go.

    Returns:
        Exit code 0, or that of the process that failed first: 137 for SIGKILL, 143 for SIGTERM.
    """
    environment.share_hash_seed()
    # We report errors ourselves. A handler here also silences the loggers below this one, which
    # have levels of their own.
    torchrun = logging.getLogger("torch.distributed.elastic")
    torchrun.handlers = [logging.NullHandler()]
    torchrun.propagate = False
    if not environment.variable("TORCH_CPP_LOG_LEVEL"):
        # Otherwise torch prints frames of C++ when a rank loses another one.
        environment.set_variable("TORCH_CPP_LOG_LEVEL", "ERROR")
    set_signals(config)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    to_close: RendezvousHandler | None = None
    try:
        spec = worker_spec(config, program, rendezvous)
        to_close = spec.rdzv_handler
        return run_agents(config, spec, rendezvous)
    except SignalException as error:
        # Other nodes may continue without this one, and meet again: the rendezvous stays open.
        to_close = None
        return Outcome(128 + error.sigval)
    except (DistError, RendezvousError) as error:
        reason = reason_of(error, config)
        return Outcome(EXIT_ERROR, f"{config.rdzv_endpoint}: the rendezvous failed ({reason})")
    finally:
        if to_close is not None:
            # The store may have ended with another node; the cause is known already.
            with suppress(Exception):
                to_close.shutdown()


def set_signals(config: "LaunchConfig") -> None:
    """Tell torchrun's agent which signals stop its processes; that of torch 2.8 takes no advice."""
    signals: str | None = getattr(config, "signals_to_handle", None)
    if signals is None:
        return
    names = signals.split(",")
    # A program under nohup goes on when its terminal is closed, and so do its processes.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and "SIGHUP" in names:
        names.remove("SIGHUP")
    environment.set_variable("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(names))


def run_agents(config: "LaunchConfig", spec: "WorkerSpec", rendezvous: Rendezvous) -> Outcome:
    """Run torchrun's agents, one after the other, until the processes succeed or must stop."""
    heartbeats = tempfile.TemporaryDirectory(prefix="heartbeats-", ignore_cleanup_errors=True)
    with heartbeats as folder, environment.as_agent():
        environment.set_variable(heartbeat.FOLDER, folder)
        hung_ranks = HungRanks(Path(folder))
        requests = Requests(Path(folder))
        # torchrun's agent restarts its processes whatever their exit codes are. So each agent here
        # has no restarts, and the next one meets the other nodes again at the same endpoint.
        for restarts_left in range(config.max_restarts, -1, -1):
            is_last = restarts_left == 0
            try:
                with requests.noted():
                    outcome = run_agent(config, spec, hung_ranks, requests, is_last=is_last)
            except Exception as error:
                # The agent has ended its ranks, and the nodes meet again.
                if is_last or not rendezvous.is_loss(error):
                    raise
                continue
            if outcome is not None:
                return outcome
    raise AssertionError("the last agent has an outcome")


def run_agent(
    config: "LaunchConfig",
    spec: "WorkerSpec",
    hung_ranks: HungRanks,
    requests: Requests,
    *,
    is_last: bool,
) -> Outcome | None:
    """Run one agent; return how its processes ended, or None if another agent must restart them."""
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    assert config.logs_specs is not None  # LaunchConfig has set it
    agent = LocalElasticAgent(
        spec,
        config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
    )
    torch_agent.end_processes_within(agent, shutdown_timeout(config))
    torch_agent.interrupt_ranks(agent, requests.has_training_rank)
    torch_agent.before_monitoring(agent, hung_ranks.end)
    torch_agent.before_monitoring(agent, requests.pass_on)
    result = agent.run()
    if result is None:
        raise RendezvousClosedError("the other nodes have finished without this one")
    if result.state is WorkerState.SUCCEEDED:
        return Outcome(0)
    hung_ranks.explain(result.failures)
    if is_last or is_final(result.failures, config):
        return outcome_of(result.failures)
    return None


def worker_spec(
    config: "LaunchConfig", program: Sequence[str], rendezvous: Rendezvous
) -> "WorkerSpec":
    """Build what one agent runs: Python with this program, in each process of the node."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = None, None
    # Other backends find out the address of rank zero when the nodes meet.
    if config.rdzv_backend == "static":
        master_addr, master_port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", *program),
        rdzv_handler=rendezvous.make(parameters),
        max_restarts=0,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        **newer_options(config),
    )


def shutdown_timeout(config: "LaunchConfig") -> int:
    """The seconds that processes have to save after a signal."""
    seconds: int | None = getattr(config, "shutdown_timeout", None)
    if seconds is None:  # before torch 2.15, by ``start``
        return int(environment.variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or SHUTDOWN_TIMEOUT_S)
    return seconds


def newer_options(config: "LaunchConfig") -> dict[str, Any]:
    """Those of ``NEWER_OPTIONS`` that the installed version has."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    names = {field.name for field in fields(WorkerSpec)}
    return {name: getattr(config, name) for name in NEWER_OPTIONS if name in names}
