"""What every command does around its ``main``: output that cannot fail, and a quiet Ctrl-C."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from samestep.ranks import environment, interrupts, output

EXIT_LOST_READER = 128 + signal.SIGPIPE  # 141


def run(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` as the whole program, and exit with the code that it returns; 130 at Ctrl-C."""
    # Now, because the parent may end while libraries are imported. Then it would be process 1.
    environment.remember_parent()
    make_output_safe()
    try:
        exit_code = main()
    except KeyboardInterrupt:
        exit_code = interrupts.EXIT_INTERRUPTED
    finally:
        # Python's own shutdown takes a moment. A handler that raises there prints a traceback.
        for signum in signals_to_handle():
            signal.signal(signum, signal.SIG_DFL)
    sys.exit(exit_code)


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
