"""How the ranks of a node ended: one exit code and one cause for all of them."""

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from samestep.ranks.failure import (
    BY_AGENT,
    EXIT_CONFIG,
    EXIT_ERROR,
    EXIT_REQUEUED,
    EXIT_SIGTERM,
    LOST,
    PREFIX,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

# After saving, or before there was anything to save.
STOPPED = (EXIT_SIGTERM, EXIT_REQUEUED, -signal.SIGTERM)


class Outcome(NamedTuple):
    """How the processes ended: the exit code of the first that failed, and why it failed."""

    exit_code: int
    cause: str = ""
    is_printed: bool = False  # by the rank itself, on the stderr of this process


def outcome_of(failures: "Mapping[int, ProcessFailure]") -> Outcome:
    """Find one exit code and one cause for all processes that failed."""
    # torch has no failure where its check for processes that a driver blocks, off by default, ends
    # them.
    if not failures:
        return Outcome(EXIT_ERROR, "a rank hangs in the kernel, in a driver or a file system")
    messages = {rank: report_of(failure).message for rank, failure in failures.items()}
    rank = first_rank(failures)
    code = failures[rank].exitcode
    if code in STOPPED:
        # The agent sends SIGTERM to the other ranks when the first one has ended.
        was_requeued = EXIT_REQUEUED in {failure.exitcode for failure in failures.values()}
        return Outcome(EXIT_REQUEUED if was_requeued else EXIT_SIGTERM)
    if code < 0:
        return outcome_of_signal(rank, -code, messages[rank])
    rank = rank_to_name(rank, messages)
    if not messages[rank]:
        return Outcome(code, f"rank {rank} ended with exit code {code} and without a message")
    if report_of(failures[rank]).printing_rank == BY_AGENT:
        # It names no rank: all of the node raise it.
        return Outcome(code, messages[rank])
    return Outcome(code, f"rank {rank}: {messages[rank]}", is_printed=True)


def rank_to_name(first: int, messages: Mapping[int, str]) -> int:
    """The rank whose message is shown: the first that failed, unless another one knows more."""
    # A rank that names what the user can mend says more than one that has lost the others.
    for rank in (first, *messages):
        if messages[rank].startswith(PREFIX):
            return rank
    return first


def outcome_of_signal(rank: int, signum: int, message: str) -> Outcome:
    """Find the exit code and the cause for a rank that a signal ended."""
    # The agent has killed a rank that hung, and left the message in its place.
    if message:
        return Outcome(EXIT_ERROR, f"rank {rank}: {message}", is_printed=True)
    return Outcome(128 + signum, f"rank {rank} was ended by {name_signal(signum)}")


def name_signal(signum: int) -> str:
    """Name a signal that ended a process: ``SIGKILL (out of memory?)``."""
    name = signal.Signals(signum).name
    # Where the kernel has killed a process for its memory, no other message says so.
    if signum == signal.SIGKILL:
        return f"{name} (out of memory?)"
    return name


def first_rank(failures: "Mapping[int, ProcessFailure]") -> int:
    """Find the rank that failed first.

    The other ranks lose their connection to it a moment later, or are stopped by the agent. torch
    knows the time in seconds only. Within one second the order is: a rank that was killed, a rank
    that explains itself, the rank that reported first. A rank that has only lost another one comes
    after all of these.
    """
    first = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, bool, bool, int]:
        failure = failures[rank]
        report = report_of(failure)
        is_late = failure.timestamp > first + 1
        was_stopped = failure.exitcode in STOPPED
        was_killed = failure.exitcode < 0
        # The smallest comes first, and False is smaller than True.
        return (
            is_late,
            was_stopped,
            LOST in report.message,
            not was_killed,
            not report.message.startswith(PREFIX),
            report.time_ns,
        )

    return min(failures, key=order)


class Report(NamedTuple):
    """What a rank has left for its agent; the message is empty if it has left nothing."""

    message: str
    time_ns: int
    printing_rank: int | None = None


def report_of(failure: "ProcessFailure") -> Report:
    """What a rank has left for its agent, which ``samestep.ranks.failure`` writes.

    If it has left nothing, the time is torch's in whole seconds.
    """
    report = failure.error_file_data.get("message")
    time_ns = failure.timestamp * 10**9
    # Without an error file torch makes a text of its own.
    if not isinstance(report, dict):
        return Report("", time_ns)
    extra = report.get("extraInfo", {})
    return Report(
        str(report.get("message", "")),
        int(extra.get("time_ns", time_ns)),
        extra.get("printing_rank"),
    )


def is_final(failures: "Mapping[int, ProcessFailure]", config: "LaunchConfig") -> bool:
    """Whether processes that failed like this must not be restarted."""
    final = {EXIT_CONFIG}
    if config.min_nodes == config.max_nodes:
        # With a fixed number of nodes a stopped node is not replaced, so the others would wait for
        # it forever. If it was node 0, the store is gone too.
        final |= {EXIT_SIGTERM, EXIT_REQUEUED}
    codes = {failure.exitcode for failure in failures.values()}
    return not codes.isdisjoint(final)


def reason_of(error: Exception, config: "LaunchConfig") -> str:
    """Return why the nodes cannot meet, in one line."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    # torch adds frames of C++ below the first line.
    text = str(error.__cause__ or error).partition("\n")[0]
    if text:
        return text
    # These two errors of torch have no text.
    if isinstance(error, RendezvousClosedError):
        return "another node has finished the run, or has failed for good"
    if isinstance(error, RendezvousTimeoutError):
        seconds = config.rdzv_configs.get("join_timeout", config.rdzv_configs.get("timeout"))
        return f"{config.min_nodes} or more nodes have not met within {seconds} s"
    return type(error).__name__
