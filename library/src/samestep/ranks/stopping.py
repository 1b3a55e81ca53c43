"""Stop together: a signal on one rank stops all ranks between two steps, after saving.

::

    SIGTERM, SIGINT    the handler only remembers the signal; SIGHUP too: a closed terminal
    before each step   agreed(): one all-reduce says whether any rank got one, or wants to save
    one of them did    every rank saves, and raises Stopped; the exit code is 143

Lightning's own handler talks to the other ranks at once, in the middle of a step, and hangs there.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
from torch import distributed as dist

from samestep.ranks import collectives, environment
from samestep.ranks.failure import EXIT_SIGTERM

Waited = TypeVar("Waited")

GRACE_S = 30  # seconds that a rank without its agent has to save; torchrun gives its ranks as many


class Stopped(SystemExit):
    """Ends the process with the shell's exit code for a signal: 143 for SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.name = signal.Signals(signum).name


class _State:
    """What this process was told, and where it may stop. One per process, as signals are."""

    installed = False
    signum = 0  # the first signal that came
    deferred = False  # a signal waits for check()
    before: ClassVar[dict[int, Any]] = {}  # the handlers that the program had


def handled() -> set[signal.Signals]:
    """The signals that stop a run; not SIGHUP under nohup, which ignores it."""
    signals = {signal.SIGTERM, signal.SIGINT}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    return signals


def install() -> None:
    """Remember the signals from now on; end when torchrun's agent has ended."""
    _State.installed = True
    _State.signum, _State.deferred = 0, False
    _State.before = {signum: signal.signal(signum, _remember) for signum in handled()}
    if environment.under_torchrun():
        threading.Thread(target=_follow_agent, args=(environment.parent(),), daemon=True).start()


def uninstall() -> None:
    """Give the signals back to the program, for instance to a notebook."""
    _State.installed, _State.deferred = False, False
    if threading.current_thread() is threading.main_thread():
        for signum, handler in _State.before.items():
            signal.signal(signum, handler)


def is_installed() -> bool:
    """Whether this process remembers its signals."""
    return _State.installed


def defer(deferred: bool = True) -> None:
    """From now on a signal waits for ``check``, or ends the process at once: no longer deferred."""
    _State.deferred = deferred


def interruptible(wait: Callable[[], Waited]) -> Waited:
    """Call ``wait``, within which a signal raises ``Stopped``: waiting for data can take long.

    A signal that arrived earlier raises at once. The caller must catch ``Stopped`` and ask
    ``agreed`` or ``check``, as the other ranks do before their next step.
    """
    deferred = _State.deferred
    try:
        _State.deferred = False
        if _State.signum:
            raise Stopped(_State.signum)
        return wait()
    finally:
        _State.deferred = deferred


def agreed(*, save: bool = False, busy: bool = False) -> tuple[int, bool, bool]:
    """The largest signal that a rank got, otherwise 0; whether a rank wants to save, or is busy.

    With a signal the others are not known, and busy ranks are not if one wants to save. One
    all-reduce of a number between CPUs: every rank must call this at the same point.
    """
    # One number holds all three: a signal weighs more than the wish to save, and that more than
    # being busy.
    number = 4 * _State.signum + 2 * save + busy
    # A rank alone makes no tensor in each step.
    if collectives.num_ranks() > 1:
        number = int(collectives.all_reduce(torch.tensor(number), dist.ReduceOp.MAX))
    return number // 4, number % 4 >= 2, number % 4 == 1


def check() -> None:
    """Raise ``Stopped`` on every rank if one of them got a signal; all ranks must call this."""
    signum, *_ = agreed()
    if signum:
        raise Stopped(signum)


def _remember(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGINT and _State.signum:
        raise KeyboardInterrupt  # asked a second time: end without saving
    _State.signum = _State.signum or signum
    if not _State.deferred:
        raise Stopped(signum)


def _follow_agent(agent: int) -> None:
    """End when the agent has ended: a killed torchrun leaves its ranks running."""
    while os.getppid() == agent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(EXIT_SIGTERM)


def _obey_parent_only() -> None:
    """Let a forked loader process end when its rank says so, and only then.

    An agent sends SIGTERM to the loader processes too, a terminal Ctrl-C or SIGHUP. A loader
    process that ends before its rank makes torch raise there, in the middle of the step after
    which the rank would save.
    """
    if signal.getsignal(signal.SIGTERM) is not _remember:
        return
    # torch installs a handler of its own in the loader process later, so the signals are blocked,
    # and a thread waits for that of the rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, handled())

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


os.register_at_fork(after_in_child=_obey_parent_only)
