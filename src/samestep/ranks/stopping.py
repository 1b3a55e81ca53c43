"""Being told to stop: by a signal, by the end of the agent, or by a step that never ends.

A signal handler that talks to other ranks, as Lightning's does, hangs in the middle of a step. Here
it only notes the signal; between two steps all ranks agree on what to do (``LastCheckpoint``).
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import distributed as dist

from samestep.ranks import environment

GRACE_S = 30  # seconds an orphan has to save; torchrun gives its workers as many


class Stopped(SystemExit):
    """Ends the process with the shell's exit code for a signal: 143 for SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.name = signal.Signals(signum).name


class _State:
    """What this process was told, and whether it may stop where it is."""

    signum = 0
    deferred = False


def install() -> None:
    """Note SIGTERM and SIGINT from now on; end when torchrun's agent has ended."""
    _State.deferred = False
    signal.signal(signal.SIGTERM, _note)
    signal.signal(signal.SIGINT, _note)
    if environment.under_torchrun():
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def defer() -> None:
    """From now on a signal waits until the ranks agree: no rank may leave the others in a step."""
    _State.deferred = True


@contextmanager
def at_once() -> Iterator[None]:
    """Let a signal raise ``Stopped`` here, where this rank may wait for long: for its next images.

    A signal noted before raises too: else one that came a moment early would wait for the images.
    """
    deferred = _State.deferred
    try:
        _State.deferred = False
        if _State.signum:
            raise Stopped(_State.signum)
        yield
    finally:
        _State.deferred = deferred


def agreed(wish: int = 0) -> int:
    """The largest wish of all ranks, where one that got a signal wishes its number.

    One all-reduce of a number between CPUs: every rank must call this at the same point.
    """
    wish = max(wish, _State.signum)
    if not dist.is_initialized():
        return wish
    largest = torch.tensor(wish)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _note(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGINT and _State.signum:
        raise KeyboardInterrupt  # asked a second time: without saving
    _State.signum = _State.signum or signum
    if not _State.deferred:
        raise Stopped(signum)


def end_quietly(worker_id: int) -> None:
    """Let a loader process end without an error at SIGTERM, which torchrun sends to it too.

    Else torch raises in its rank, in the middle of the step that the rank is about to save.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _follow(agent: int) -> None:
    """End with the agent: torchrun leaves its workers running when it is killed."""
    while os.getppid() == agent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)
