"""Private names of torchrun's agent that ours uses: what it does for its ranks, and at a signal.

Each has a canary test in library/tests, which fails when torch has changed.
"""

import inspect
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from samestep.ranks import interrupts

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


def before_monitoring(agent: "LocalElasticAgent", hook: "Callable[[WorkerGroup], None]") -> None:
    """Let torchrun's agent call ``hook`` each time before it checks its ranks.

    torch 2.15 has no public hook here.
    """
    monitor: Callable[[WorkerGroup], RunResult] = agent._monitor_workers

    def call_hook_and_monitor(worker_group: "WorkerGroup") -> "RunResult":
        hook(worker_group)
        return monitor(worker_group)

    agent._monitor_workers = call_hook_and_monitor


def end_processes_within(agent: "LocalElasticAgent", seconds: int) -> None:
    """Let torchrun's agent kill its processes so many seconds after a signal, and no sooner.

    Before torch 2.15 these are 30 seconds, in which a run may not be able to save. torch 2.6 also
    closes the rendezvous then, where the nodes must meet again.
    """
    shut_down: Callable[..., None] = agent._shutdown
    options = inspect.signature(shut_down).parameters
    if "timeout" in options:
        agent._shutdown_timeout = seconds
        return
    stays_open = {"is_restart": True} if "is_restart" in options else {}

    def shut_down_in_time(death_sig: signal.Signals = signal.SIGTERM, **_: Any) -> None:
        processes: Any = agent._pcontext
        if processes is not None:
            processes.close = partial(type(processes).close, processes, timeout=seconds)
        shut_down(death_sig, **stays_open)

    agent._shutdown = shut_down_in_time  # type: ignore[assignment, method-assign]


def interrupt_ranks(agent: "LocalElasticAgent", is_training: Callable[[], bool]) -> None:
    """Let Ctrl-C end the processes of torchrun's agent quietly, and the second one at once.

    torch 2.15 passes on the first one, at which a program that still imports prints a traceback.
    At the second one it would send a SIGTERM, and wait as long again for the ranks to save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    shut_down: Callable[..., None] = agent._shutdown

    def shut_down_quietly(death_sig: signal.Signals = signal.SIGTERM, **options: Any) -> None:
        if death_sig == signal.SIGINT and not is_training():
            interrupts.say_interrupted()
            death_sig = signal.SIGTERM
        try:
            shut_down(death_sig, **options)
        except SignalException as second:
            if second.sigval == signal.SIGINT:
                # It waits for the ranks. torch's SIGTERM follows, and must not come at once: Linux
                # may give both signals to another thread, so that neither wakes the main one.
                shut_down(signal.SIGINT, **options)
            raise

    agent._shutdown = shut_down_quietly  # type: ignore[assignment, method-assign]
