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

from samestep.ranks import environment, secrets
from samestep.ranks.failure import PREFIX

FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux's prctl
ORPHANS_S = 30  # seconds that ranks whose agent has ended have to save
MESSAGE_BYTES = 4096  # Kubernetes keeps no more


def supervise() -> int | None:
    """Continue in a child, and wait for it here; call it before torch starts its threads.

    Returns:
        In the child None; in this process, once the child has ended, its exit code.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans come here even if this is not process 1
    signals = {*FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # Ctrl-C reaches the child through this process only, once
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return None
    # Slurm sends SIGTERM to every process of a job step, so the child gets that one from there.
    is_job_step = environment.variable("SLURM_STEP_ID") is not None
    to_forward = FORWARDED - {signal.SIGTERM} if is_job_step else FORWARDED
    ended: dict[int, int] = {}
    while child not in ended:
        signum = signal.sigwait(signals)
        if signum in to_forward:
            os.kill(child, signum)
            to_forward = set()  # a second signal would end torchrun's agent without its ranks
        ended |= reap()
    stop_orphans()
    exit_code = os.waitstatus_to_exitcode(ended[child])
    if exit_code >= 0:
        return exit_code
    # A signal ended the child, which could not report that itself.
    name = signal.Signals(-exit_code).name
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    cause = f"ended by {name} before the ranks had started"
    if -exit_code not in FORWARDED:
        cause = f"{PREFIX}the agent of torchrun was ended by {name}{hint}"
    return report(128 - exit_code, cause)


def reap() -> dict[int, int]:
    """Collect the status of each process that has ended, so that none stays a zombie."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    except ChildProcessError:
        pass  # no child is left
    return ended


def stop_orphans() -> None:
    """Tell ranks whose agent has ended to save, and wait for them."""
    deadline = time.monotonic() + ORPHANS_S
    stopped: set[str] = set()
    children = Path(f"/proc/self/task/{os.getpid()}/children")  # not every kernel lists them
    while orphans := set(children.read_text().split()) if children.exists() else set():
        for orphan in orphans - stopped:
            os.kill(int(orphan), signal.SIGTERM)
        stopped |= orphans
        if time.monotonic() > deadline:
            break
        signal.sigtimedwait({signal.SIGCHLD}, 1)
        reap()


def report(exit_code: int, cause: str = "") -> int:
    """Print why the node ends, also as Kubernetes' termination message; return the exit code."""
    if not cause:
        return exit_code
    cause = secrets.redact(cause)
    print(cause if cause.startswith(PREFIX) else f"entrypoint: {cause}", file=sys.stderr)
    chosen = environment.variable("TERMINATION_LOG")
    path = Path(chosen or "/dev/termination-log")
    if chosen or path.exists():
        # As much as Kubernetes keeps, without half a character at the end.
        message = f"exit code {exit_code}: {cause}".encode()[:MESSAGE_BYTES].decode(errors="ignore")
        try:
            path.write_bytes(message.encode())
        except OSError as error:
            print(f"entrypoint: {path}: {error.strerror}", file=sys.stderr)
    return exit_code
