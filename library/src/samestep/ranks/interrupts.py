"""Ctrl-C before a run has begun: one line and exit code 130, also in the middle of an import."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn

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


@contextmanager
def interruptible_import() -> Iterator[None]:
    """Answer Ctrl-C at once while a script imports torch within this block; imports no torch.

    It raises KeyboardInterrupt, as everywhere. A script that does not catch it ends without a
    traceback, and with exit code 130.
    """
    is_main = threading.current_thread() is threading.main_thread()
    # A handler of the program's own stays; signals are handled in the main thread.
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    was_interrupted = False

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        nonlocal was_interrupted
        if not was_interrupted:
            say_interrupted()
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if not was_interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if was_interrupted:
        # A prompt shows the error, and goes on.
        if not hasattr(sys, "ps1"):
            sys.excepthook = end_quietly
        # Whatever the import made of it: some libraries catch all errors, or raise others.
        raise KeyboardInterrupt


def end_quietly(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """A ``sys.excepthook`` after an interrupt that was answered: no traceback of it."""
    if isinstance(error, KeyboardInterrupt):
        # Python takes the exit code from a SystemExit that a hook raises.
        raise SystemExit(EXIT_INTERRUPTED)
    sys.__excepthook__(kind, error, frames)
