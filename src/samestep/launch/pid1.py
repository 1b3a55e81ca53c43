"""What the first process of a container must do besides training, and what it leaves behind.

The kernel gives process 1 no default signals and every orphan. So it only waits here, and trains
in a child: SIGTERM ends that at any moment, until torchrun's agent takes it to the ranks instead.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from samestep.ranks import environment, secrets

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ORPHANS_S = 30  # seconds for ranks whose agent died; they save when they notice
MESSAGE_BYTES = 4096  # as much as Kubernetes keeps


def supervise() -> int | None:
    """Continue in a child, and wait for it here; call before torch starts its threads.

    The first signal is passed on. A second would end torchrun's agent without its ranks.

    Returns:
        In the child None; here, once it has ended, its exit code.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # also where this is not process 1
    signals = {*PASSED_ON, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # Ctrl-C comes through the parent, once
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return None
    told, status = False, None
    while status is None:
        signum = signal.sigwait(signals)
        if signum == signal.SIGCHLD:
            status = reap().get(child)
        elif not told:
            os.kill(child, signum)
            told = True
    end_orphans()
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code >= 0:
        return exit_code
    name = signal.Signals(-exit_code).name
    if -exit_code in PASSED_ON:
        return leave(128 - exit_code, f"ended by {name} before the ranks had started")
    why = " (out of memory?)" if -exit_code == signal.SIGKILL else ""
    return leave(128 - exit_code, f"error: the agent of torchrun was ended by {name}{why}")


def reap() -> dict[int, int]:
    """The status of each process that has ended, so that none stays a zombie."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:
        pass  # there are no others
    return ended


def end_orphans() -> None:
    """Let ranks whose agent has died save and end."""
    deadline = time.monotonic() + ORPHANS_S
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    told: set[str] = set()
    while orphans := set(children.read_text().split()) if children.exists() else None:
        for orphan in orphans - told:
            os.kill(int(orphan), signal.SIGTERM)
        told |= orphans
        if time.monotonic() > deadline:
            break
        signal.sigtimedwait({signal.SIGCHLD}, 1)
        reap()


def leave(exit_code: int, cause: str = "") -> int:
    """Say why the node ends, also where Kubernetes and its users look first; no secrets."""
    if not cause:
        return exit_code
    cause = secrets.redact(cause)
    print(cause if cause.startswith("error: ") else f"entrypoint: {cause}", file=sys.stderr)
    path = Path(environment.variable("TERMINATION_LOG") or "/dev/termination-log")
    if path.exists() or environment.variable("TERMINATION_LOG"):
        try:
            message = f"exit code {exit_code}: {cause}".encode()[:MESSAGE_BYTES]
            path.write_bytes(message.decode(errors="ignore").encode())
        except OSError as error:
            print(f"entrypoint: {path}: {error.strerror}", file=sys.stderr)
    return exit_code
