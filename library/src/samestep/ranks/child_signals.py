"""Signals and the processes that a rank starts with multiprocessing, such as loader processes.

An agent, Slurm and ``kill`` of a process group send a signal to loader processes too, and a
terminal Ctrl-C or SIGHUP. A loader process that ends before its rank makes torch raise there, in
the middle of the step after which the rank would save. So it ends when its rank says so, and only
then. Imports no torch: a process that is started anew imports this file first.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ResourceTracker
from typing import Any


def knows_senders() -> bool:
    """Whether a process can learn who has sent it a signal, which macOS does not say."""
    return hasattr(signal, "sigwaitinfo")


def obey_parent_only(parent: int, signals: Iterable[int]) -> None:
    """Let this process get none of these signals, except SIGTERM of the process that started it.

    Where it cannot learn who has sent one it gets none at all; see ``kill_to_terminate``.
    """
    # torch installs a handler of its own in a loader process later, so the signals are blocked, and
    # a thread waits for that of the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    sys.excepthook = leave_out_lost_rank
    if not knows_senders():
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def leave_out_lost_rank(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an uncaught error, but not that the rank has stopped in the middle of an exchange.

    A thread of multiprocessing that hands over memory prints it, and it means nothing by then.
    """
    in_thread = threading.current_thread() is not threading.main_thread()
    if not in_thread or not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


class Obedience:
    """Part of a process object that is sent to a new Python, which obeys when it reads it.

    Args:
        signals: those that the process must not get.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.signals = sorted(signals)

    def __reduce__(self) -> tuple[Any, ...]:
        return obey_parent_only, (os.getpid(), self.signals)


def start_obedient(process: BaseProcess, signals: set[int]) -> None:
    """Start a process of multiprocessing, whose Python gets none of these signals from the start.

    A fork obeys by itself. Where the process is a new Python (``spawn``, ``forkserver``), it
    inherits which signals are blocked, because imports take seconds; so does the server that forks.
    """
    if is_fork(process):
        start_process(process)
    else:
        start_new_python(process, signals)
    if not knows_senders():
        kill_to_terminate(process)


def start_new_python(process: BaseProcess, signals: set[int]) -> None:
    """Start a process that reads the process object, and obeys as soon as it does."""
    # In front, because the attributes are read in their order: the rank may want to end it while it
    # still reads the data set.
    attributes = dict(vars(process))
    vars(process).clear()
    vars(process).update(obedience=Obedience(signals), **attributes)
    with blocked(signals):
        start_process(process)


def kill_to_terminate(process: BaseProcess) -> None:
    """Let the rank end this process by SIGKILL where it would send SIGTERM, which is blocked there.

    It leaves as little behind: a process that obeys ends at once too, without cleaning up.
    """
    process.terminate = process.kill  # type: ignore[method-assign]
    # Python itself terminates those that are left when the rank ends, and then waits for them.
    atexit.unregister(kill_daemons)
    atexit.register(kill_daemons)


def kill_daemons() -> None:
    """Kill the processes of multiprocessing that must not outlive this one."""
    # torch's handler raises when a loader process is killed, here in any function of the exit.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def is_fork(process: BaseProcess) -> bool:
    """Whether a process that has not started will be a fork of this one."""
    if isinstance(process, (ForkServerProcess, SpawnProcess)):
        return False
    # One of no context starts as the default says.
    return isinstance(process, ForkProcess) or multiprocessing.get_start_method() == "fork"


@contextmanager
def blocked(signals: set[int]) -> Iterator[None]:
    """Let no signal of these reach this thread within the block, nor a program that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


start_process = BaseProcess.start
start_tracker = ResourceTracker.ensure_running
