"""The process of a trial: ``python``, or a fork of a process that has imported the libraries.

Most of a short trial's processor time goes into ``import torch`` and ``import lightning``. A fork
has them, and shares their memory; it imports the project's own code itself, so that it runs what
``python train.py`` would run. The server that forks is that of Python's ``multiprocessing``.
"""

import atexit
import fcntl
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

from samestep.ranks import environment

PRELOAD = "samestep.sweep.preload"
CONTEXT = multiprocessing.get_context("forkserver")


def serve(*, can_fork: bool) -> None:
    """Start the server, which ends with this process and its trials.

    Args:
        can_fork: whether it imports the libraries of all trials; only for trials that are one
            process without a GPU, on Linux.
    """
    CONTEXT.set_forkserver_preload([PRELOAD] if can_fork else [])
    # Ctrl-C in the terminal is for the search alone.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)


def start(
    program: Sequence[str], variables: Mapping[str, str], log: Path
) -> multiprocessing.process.BaseProcess:
    """Start ``python`` with these words and additional variables; its output goes to ``log``."""
    process = CONTEXT.Process(target=be_python, args=(program, variables, log))
    process.start()
    return process


def is_running(log: Path) -> bool:
    """Whether any process of the trial with this log still runs."""
    try:
        with log.open("rb") as output:
            fcntl.flock(output, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def be_python(program: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """Be the process that ``start`` has asked the server for."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        # The lock belongs to the open file: every process of a trial holds it until it ends.
        fcntl.flock(output, fcntl.LOCK_EX)
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    for name, value in variables.items():
        environment.set_variable(name, value)
    if PRELOAD not in sys.modules:
        os.execv(sys.executable, [sys.executable, *program])

    multiprocessing.set_start_method(None, force=True)
    sys.argv[:] = sys.orig_argv[1:] = program
    sys.path[0] = str(Path(program[0]).resolve().parent)
    try:
        runpy.run_path(program[0], run_name="__main__")
    finally:
        # Python calls what is registered there when it ends, but not at the end of such a process.
        atexit._run_exitfuncs()
