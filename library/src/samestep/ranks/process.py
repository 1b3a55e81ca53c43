"""What every command does around its ``main``: output that cannot fail, and a quiet Ctrl-C."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn

from samestep.ranks import environment, output

EXIT_INTERRUPTED = 128 + signal.SIGINT  # 130
INTERRUPTED = "Interrupted before training began; nothing is lost."
EXIT_LOST_READER = 128 + signal.SIGPIPE  # 141


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` as the whole program, and exit with the code that it returns; 130 at Ctrl-C."""
    # Now, because the parent may end while libraries are imported. Then it would be process 1.
    environment.remember_parent()
    make_output_safe()
    try:
        exit_code = main()
    except KeyboardInterrupt:
        exit_code = EXIT_INTERRUPTED
    finally:
        # Python's own shutdown takes a moment. A handler that raises there prints a traceback.
        for signum in signals_to_handle():
            signal.signal(signum, signal.SIG_DFL)
    sys.exit(exit_code)


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


def signals_to_handle() -> list[signal.Signals]:
    """The signals that end a command, but for those that this process was told to ignore."""
    found = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup has a process ignore SIGHUP, and a handler would undo that.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            found.append(signum)
    return found


def make_output_safe() -> None:
    """Let nothing that is printed or drawn end this process.

    - A reader that goes away (``| head -1``) and a full disk lose the output, not the run.
    - A closed stdout or stderr (``>&-``) is replaced by ``/dev/null``.
    - Characters that the terminal's encoding lacks are printed as escapes.
    - Figures are only saved to files, whatever backend ``MPLBACKEND`` names.
    - matplotlib is silent where it finds no home directory for its fonts.

    A reader that only stops reading blocks this process, as it blocks every program.
    """
    environment.set_variable("MPLBACKEND", "agg")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # Otherwise the next file that is opened would become stdout, and get what is printed.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is missing
            os.set_inheritable(null, True)  # processes started here need it too
    output.make_streams_safe()


def has_lost_reader(stdout: os.stat_result) -> bool:
    """Whether the reader of stdout has gone; ``stdout`` is its fstat at the start."""
    # Once something could not be written there, /dev/null has replaced it.
    if not os.path.samestat(stdout, os.fstat(sys.stdout.fileno())):
        return True
    return output.has_hung_up(sys.stdout.fileno())
