"""Ctrl-C before a run has begun: one line and exit code 130."""

import os
import signal
from contextlib import suppress
from types import FrameType

from samestep.ranks import environment

EXIT_INTERRUPTED = 128 + signal.SIGINT  # 130
INTERRUPTED = "Interrupted before training began; nothing is lost."


def interrupt_at_once() -> None:
    """Let Ctrl-C end this process with one line and without cleaning up.

    It does until another handler is installed: the one of an agent, or of a run.
    """
    # Imports of large libraries turn a KeyboardInterrupt into other errors.
    signal.signal(signal.SIGINT, _end_at_once)


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    say_interrupted()
    os._exit(EXIT_INTERRUPTED)


def say_interrupted() -> None:
    """Say on the first rank of a node that Ctrl-C came before training."""
    if environment.local_rank():
        return
    # A terminal has shown ^C in this line.
    start = "\n" if os.isatty(2) else ""
    # Not by ``print``: the signal may have interrupted one, which cannot be entered twice.
    with suppress(OSError):
        os.write(2, f"{start}{INTERRUPTED}\n".encode())
