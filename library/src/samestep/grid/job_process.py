"""The process of a job: a run that another process starts and waits for."""

import fcntl
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from samestep.ranks import environment, failure
from samestep.run import lock

MAX_STARTS = 3  # of a job that is killed from outside
KILLED = (failure.EXIT_SIGTERM, 128 + signal.SIGKILL)


def start_job(
    program: Sequence[str], variables: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start ``python`` with these arguments and more variables; its output goes to ``log``."""
    with log.open("ab") as output:
        # The lock belongs to the open file, not to this process: every process of the job has the
        # file as its output, and so holds the lock until it ends, even if this process is killed.
        fcntl.flock(output, fcntl.LOCK_EX)
        return start_with_output(program, variables, output)


def claim(path: Path) -> IO[bytes] | None:
    """Open and lock a file, such as the log of a job; None if another process has locked it."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def start_with_output(
    program: Sequence[str], variables: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start ``python`` with this file as its output, whose lock it then holds."""
    environment.share_hash_seed()
    return subprocess.Popen(
        [sys.executable, *program],
        env=environment.variables() | dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # Ctrl-C in the terminal is for the caller alone, which then stops its jobs.
        start_new_session=True,
    )


def is_running(log: Path) -> bool:
    """Whether a process of the job with this log still runs, also one of a killed caller."""
    return lock.is_locked(log)


def is_killed(exit_code: int) -> bool:
    """Whether a job was ended from outside, for example when memory ran out."""
    return exit_code < 0 or exit_code in KILLED


def last_error(log: Path) -> str:
    """The last error message of a job, otherwise the last line that it has printed."""
    text = log.read_text(errors="replace").rstrip()
    # On a cluster, each line begins with the name of its pod.
    errors: list[str] = re.findall(rf"(?m)^(?:\[pod/\S+\] )?{failure.PREFIX}(.+)", text)
    return errors[-1] if errors else text.rpartition("\n")[2]
