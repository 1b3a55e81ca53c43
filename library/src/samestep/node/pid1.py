"""Process 1 of a container: it forwards signals, reaps processes that have ended, and waits.

The kernel gives process 1 no default signal handlers, and makes it the parent of every orphan. So
process 1 does not train: training runs in its child. SIGTERM ends that child at any moment, until
torchrun's agent in it takes over and sends the signal to its ranks.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from samestep.node.outcome import name_signal
from samestep.ranks import environment, secrets
from samestep.ranks.failure import ASKS, PREFIX

ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
FORWARDED = ENDS | ASKS
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
ORPHANS_S = 30  # seconds that ranks whose agent has ended have to save
MESSAGE_BYTES = 4096  # Kubernetes keeps no more


def supervise() -> int | None:
    """Continue in a child, and wait for it here; call it before torch starts its threads.

    Returns:
        In the child None; in this process, once the child has ended, its exit code.
    """
    prctl = ctypes.CDLL(None).prctl
    # Orphans come here even if this is not process 1.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Blocked before the fork, so that no signal is lost between it and the loop below.
    signals = {*FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        # In a group of its own: Ctrl-C reaches the child through this process only, once.
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return None
    status = forward_signals(child, signals)
    stop_orphans()
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code < 0:
        return report_signal(-exit_code)
    return exit_code


def forward_signals(child: int, signals: set[signal.Signals]) -> int:
    """Forward signals to the child until it has ended; return its status."""
    to_forward = FORWARDED
    if environment.variable("SLURM_STEP_ID") is not None:
        # Slurm itself sends these to every process of a job step.
        to_forward = FORWARDED - {signal.SIGTERM} - ASKS
    ended: dict[int, int] = {}
    while child not in ended:
        signum = signal.sigwait(signals)
        if signum in to_forward:
            os.kill(child, signum)
            # A second signal would end torchrun's agent without its ranks.
            if signum in ENDS:
                to_forward = set()
        ended |= reap()
    return ended[child]


def report_signal(signum: int) -> int:
    """Report that a signal ended the child, which could not do it; return the exit code."""
    if signum in FORWARDED:
        cause = f"ended by {signal.Signals(signum).name} before the ranks had started"
    else:
        cause = f"{PREFIX}the agent of torchrun was ended by {name_signal(signum)}"
    return report(128 + signum, cause)


def reap() -> dict[int, int]:
    """Collect the status of each process that has ended, so that none stays a zombie."""
    ended: dict[int, int] = {}
    # The kernel sends one SIGCHLD for several processes that end at the same time.
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended  # no child is left
        if process == 0:
            return ended  # no other child has ended
        ended[process] = status


def stop_orphans() -> None:
    """Tell ranks whose agent has ended to save, and wait for them."""
    deadline = time.monotonic() + ORPHANS_S
    stopped: set[str] = set()
    while True:
        orphans = find_orphans()
        if not orphans:
            return
        # Once each: other processes of the program may end at a second signal without saving.
        for orphan in orphans - stopped:
            os.kill(int(orphan), signal.SIGTERM)
        stopped |= orphans
        if time.monotonic() > deadline:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 1)
        reap()


def find_orphans() -> set[str]:
    """Return the processes that this one has inherited from its child."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    # Not every kernel lists them.
    if not children.exists():
        return set()
    return set(children.read_text().split())


def report(exit_code: int, cause: str = "") -> int:
    """Print why the node ends, also as Kubernetes' termination message; return the exit code."""
    if not cause:
        return exit_code
    cause = secrets.redact(cause)
    print(cause if cause.startswith(PREFIX) else f"entrypoint: {cause}", file=sys.stderr)
    # Kubernetes makes this file in every container, and shows its text in the state of the pod.
    chosen = environment.variable("TERMINATION_LOG")
    path = Path(chosen or "/dev/termination-log")
    if chosen or path.exists():
        message = f"exit code {exit_code}: {cause}".encode()[:MESSAGE_BYTES]
        # The cut may have left half a character at the end.
        message = message.decode(errors="ignore").encode()
        try:
            path.write_bytes(message)
        except OSError as error:
            print(f"entrypoint: {path}: {error.strerror}", file=sys.stderr)
    return exit_code
