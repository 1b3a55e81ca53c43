"""Stop together: a signal on one rank stops all ranks between two steps, after saving.

::

    SIGTERM, SIGINT    the handler only remembers the signal; SIGHUP too: a closed terminal
    SIGUSR1, SIGUSR2   the same; it asks to save, and SIGUSR1 in a job of Slurm to queue it again
    before each step   agreed(): one all-reduce says whether any rank got one, or wants to save
    one of them did    every rank saves, and raises Stopped; the exit code is 143
    a second Ctrl-C    raises Interrupted at once: nothing is saved

Lightning's own handler talks to the other ranks at once, in the middle of a step, and hangs there.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import distributed as dist

from samestep.ranks import child_signals, collectives, environment, interrupts, output
from samestep.ranks.failure import ASKS, EXIT_SIGTERM

Waited = TypeVar("Waited")

STOPPING = "Stopping after this step, then saving. Ctrl-C again ends without saving."
READ_S = 1.0  # seconds that the next batch may take when the run stops
GRACE_S = 30  # seconds that a rank without its agent has to save; torchrun gives its ranks as many


class Stopped(SystemExit):
    """Ends the process with the shell's exit code for a signal: 143 for SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.name = signal.Signals(signum).name


class Interrupted(SystemExit):
    """Ends the process at a second Ctrl-C, without saving; the exit code is 130."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGINT)


class _State:
    """What this process was told, and where it may stop. One per process, as signals are."""

    installed = False
    signum = 0  # the first signal that came and stops the run
    deferred = False  # a signal waits for check()
    has_begun = False  # to train or to evaluate
    is_asked = False  # to save
    is_requeued = False  # asked to queue the job again
    before: ClassVar[dict[int, Any]] = {}  # the handlers that the program had


class Agreement(NamedTuple):
    """What holds on any of the ranks before a step."""

    signum: int = 0
    """The largest signal that stops the run; 0 if no rank got one."""
    save: bool = False
    """A checkpoint is due."""
    busy: bool = False
    """A rank still writes the checkpoint before."""
    asked: bool = False
    """A signal or a notice asks to save."""
    requeue: bool = False
    """A signal asks to save, to queue the job of Slurm again, and to stop."""


def handled() -> set[signal.Signals]:
    """The signals that stop a run; not SIGHUP under nohup, which ignores it."""
    signals = {signal.SIGTERM, signal.SIGINT}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    return signals


def without_handler(signals: set[signal.Signals]) -> set[signal.Signals]:
    """Those of these signals that would end the process, because the program has no handler."""
    free = {signum for signum in signals if signal.getsignal(signum) is signal.SIG_DFL}
    # Python does not know the handler of faulthandler.register, but the kernel does.
    status = Path("/proc/self/status")
    if not status.exists():
        return free
    _, _, rest = status.read_text().partition("SigCgt:")
    caught = int(rest.split()[0], base=16)
    return {signum for signum in free if not caught >> (signum - 1) & 1}


def install() -> None:
    """Remember the signals from now on; end when torchrun's agent has ended."""
    _State.installed = True
    _State.signum = 0
    _State.deferred = _State.has_begun = False
    _State.is_asked = _State.is_requeued = False
    asks = without_handler(ASKS)
    _State.before = {signum: signal.signal(signum, _remember) for signum in handled()}
    _State.before |= {signum: signal.signal(signum, _ask) for signum in asks}
    if environment.under_torchrun():
        threading.Thread(target=_follow_agent, args=(environment.parent(),), daemon=True).start()


def uninstall() -> None:
    """Give the signals back to the program, for instance to a notebook."""
    _State.installed, _State.deferred = False, False
    if threading.current_thread() is threading.main_thread():
        for signum, handler in _State.before.items():
            signal.signal(signum, handler)
        _State.before = {}


def is_installed() -> bool:
    """Whether this process remembers its signals."""
    return _State.installed


def defer(deferred: bool = True) -> None:
    """From now on a signal waits for ``check``, or ends the process at once: no longer deferred."""
    _State.deferred = deferred
    _State.has_begun = _State.has_begun or deferred


def interruptible(wait: Callable[[], Waited]) -> Waited:
    """Call ``wait``, within which a signal raises ``Stopped``: waiting for data can take long.

    A signal that arrived earlier raises after a second: the next batch is read all the same if it
    comes at once, because its digest goes with the save. The caller must catch ``Stopped`` and ask
    ``agreed`` or ``check``, as the other ranks do before their next step.
    """
    deferred = _State.deferred
    try:
        if not _State.signum:
            _State.deferred = False
            return wait()
        before = signal.signal(signal.SIGALRM, _raise_stopped)
        signal.setitimer(signal.ITIMER_REAL, READ_S)
        try:
            return wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    finally:
        _State.deferred = deferred


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise Stopped(_State.signum)


def agreed(*, save: bool = False, busy: bool = False) -> Agreement:
    """What holds on any of the ranks; what a signal has asked for is then no longer asked.

    One all-reduce of a few numbers between CPUs: every rank must call this at the same point.
    """
    asked, requeue = _State.is_asked, _State.is_requeued
    _State.is_asked = _State.is_requeued = False
    mine = Agreement(_State.signum, save, busy, asked, requeue)
    # A rank alone makes no tensor in each step.
    if collectives.num_ranks() == 1:
        return mine
    largest = collectives.all_reduce(torch.tensor(mine), dist.ReduceOp.MAX)
    signum, *others = largest.tolist()
    return Agreement(signum, *map(bool, others))


def requeue() -> bool:
    """Queue the job of Slurm again, on rank zero only; whether the run must stop."""
    # A plug-in, which only such a job needs.
    must_stop: bool = import_module("samestep.plugins.slurm").requeue_job()
    return must_stop


def check() -> None:
    """Raise ``Stopped`` on every rank if one of them got a signal; all ranks must call this."""
    signum = _State.signum
    if collectives.num_ranks() > 1:
        signum = int(collectives.all_reduce(torch.tensor(signum), dist.ReduceOp.MAX))
    if signum:
        raise Stopped(signum)


def ask_to_save() -> None:
    """Let all ranks save before the next step, and go on; any thread may call this."""
    _State.is_asked = True


def _ask(signum: int, frame: FrameType | None) -> None:
    _State.is_asked = True
    # SIGUSR2 has no such custom.
    if signum == signal.SIGUSR1 and environment.slurm_job() is not None:
        _State.is_requeued = True


def _remember(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGINT and _State.signum:
        raise Interrupted
    if signum == signal.SIGHUP:
        output.drop_lost_terminal()
    _State.signum = _State.signum or signum
    if not _State.deferred:
        if signum == signal.SIGINT and not _State.has_begun:
            interrupts.say_interrupted()
        raise Stopped(signum)
    if signum == signal.SIGINT and environment.rank() == 0:
        # Not in this thread: the signal may have interrupted a print, which cannot be entered
        # twice. Nor by ``threading``, whose locks this thread may hold.
        _thread.start_new_thread(_say_stopping, ())


def _say_stopping() -> None:
    # On a terminal the line begins with a bar of Lightning, and with ^C.
    start = "\n" if sys.stdout.isatty() else ""
    print(f"{start}{STOPPING}", flush=True)


def _follow_agent(agent: int) -> None:
    """End when the agent has ended: a killed torchrun leaves its ranks running."""
    while os.getppid() == agent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(EXIT_SIGTERM)


def _obey_in_fork() -> None:
    """Let a process that was forked from a rank end when its rank says so, and only then."""
    # Before a run has begun, and after it, a signal means what the program says.
    if signal.getsignal(signal.SIGTERM) is _remember:
        child_signals.obey_parent_only(os.getppid(), _State.before)


def _start_obedient(process: BaseProcess) -> None:
    """``start`` of multiprocessing, in every process; the loaders of a rank call it."""
    if signal.getsignal(signal.SIGTERM) is _remember:
        child_signals.start_obedient(process, {*_State.before})
    else:
        child_signals.start_process(process)


def _start_obedient_tracker(tracker: ResourceTracker) -> None:
    """``ensure_running`` of the process that removes semaphores, which spawned processes need.

    It ignores SIGTERM and SIGINT by itself; but Python 3.11 unblocks them here in this thread, with
    which other processes are started next.
    """
    with child_signals.blocked({*_State.before}):
        child_signals.start_tracker(tracker)


os.register_at_fork(after_in_child=_obey_in_fork)
# There is no hook for a new Python, as there is one for a fork.
BaseProcess.start = _start_obedient  # type: ignore[method-assign, assignment]
ResourceTracker.ensure_running = _start_obedient_tracker  # type: ignore[method-assign, assignment]
