"""How the ranks of a node ended: one exit code and one cause for all of them."""

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from samestep.ranks.failure import EXIT_CONFIG, EXIT_ERROR, EXIT_SIGTERM, LOST, PREFIX

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

STOPPED = (EXIT_SIGTERM, -signal.SIGTERM)  # after saving, or before there was anything to save


class Outcome(NamedTuple):
    """How the processes ended: the exit code of the first that failed, and why it failed."""

    exit_code: int
    cause: str = ""
    is_printed: bool = False  # by the rank itself, on the stderr of this process


def outcome_of(failures: "Mapping[int, ProcessFailure]") -> Outcome:
    """One exit code and one cause for all processes that failed."""
    if not failures:  # torch's check for processes that a driver holds up, off by default
        return Outcome(EXIT_ERROR, "a rank hangs in the kernel, in a driver or a file system")
    messages = {rank: report_of(failure)[0] for rank, failure in failures.items()}
    rank = first_rank(failures)
    code = failures[rank].exitcode
    if code in STOPPED:
        return Outcome(EXIT_SIGTERM)
    if code < 0 and messages[rank]:
        return Outcome(EXIT_ERROR, f"rank {rank}: {messages[rank]}", is_printed=True)
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        name = signal.Signals(-code).name
        return Outcome(128 - code, f"rank {rank} was ended by {name}{hint}")
    # A rank that names what the user can mend says more than one that has lost the others.
    if not messages[rank].startswith(PREFIX):
        rank = next((r for r in messages if messages[r].startswith(PREFIX)), rank)
    if not messages[rank]:
        return Outcome(code, f"rank {rank} ended with exit code {code} and without a message")
    return Outcome(code, f"rank {rank}: {messages[rank]}", is_printed=True)


def first_rank(failures: "Mapping[int, ProcessFailure]") -> int:
    """The rank that failed first.

    The other ranks lose their connection to it a moment later, or are stopped by the agent. torch
    knows the time in seconds only. Within one second the order is: a rank that was killed, a rank
    that explains itself, the rank that reported first. A rank that has only lost another one comes
    after all of these.
    """
    first = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, bool, bool, int]:
        failure = failures[rank]
        is_late = failure.timestamp > first + 1
        was_stopped, was_killed = failure.exitcode in STOPPED, failure.exitcode < 0
        message, time_ns = report_of(failure)
        explains, has_lost = message.startswith(PREFIX), LOST in message
        # The smallest comes first, and False is smaller than True.
        return is_late, was_stopped, has_lost, not was_killed, not explains, time_ns

    return min(failures, key=order)


def report_of(failure: "ProcessFailure") -> tuple[str, int]:
    """What a rank has left for its agent, and when in nanoseconds (``samestep.ranks.failure``).

    If it has left nothing, the message is empty, and the time is torch's in whole seconds.
    """
    left = failure.error_file_data.get("message")
    left = left if isinstance(left, dict) else {}
    time_ns = left.get("extraInfo", {}).get("time_ns", failure.timestamp * 10**9)
    return str(left.get("message", "")), int(time_ns)


def is_final(failures: "Mapping[int, ProcessFailure]", config: "LaunchConfig") -> bool:
    """Whether processes that failed like this must not be started again."""
    final = {EXIT_CONFIG}
    if config.min_nodes == config.max_nodes:
        # With a fixed number of nodes a stopped node is not replaced, so the others would wait for
        # it for ever. If it was node 0, the store is gone too.
        final.add(EXIT_SIGTERM)
    return bool(final & {failure.exitcode for failure in failures.values()})


def reason_of(error: Exception, config: "LaunchConfig") -> str:
    """Why the nodes cannot meet. Some of torch's errors have no text."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    text = str(error.__cause__ or error).partition("\n")[0]
    if text:
        return text
    if isinstance(error, RendezvousClosedError):
        return "another node has finished the run, or has failed for good"
    if isinstance(error, RendezvousTimeoutError):
        seconds = config.rdzv_configs.get("join_timeout", config.rdzv_configs.get("timeout"))
        return f"{config.min_nodes} or more nodes have not met within {seconds} s"
    return type(error).__name__
