"""The process of a trial."""

import fcntl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from samestep.ranks import environment
from samestep.run import lock


def start_trial(
    program: Sequence[str], variables: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start ``python`` with these arguments and more variables; its output goes to ``log``."""
    with log.open("ab") as output:
        # The lock belongs to the open file, not to this process: every process of the trial has the
        # file as its output, and so holds the lock until it ends, even if the search is killed.
        fcntl.flock(output, fcntl.LOCK_EX)
        return subprocess.Popen(
            [sys.executable, *program],
            env=environment.variables() | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal is for the search alone, which then stops its trials.
            start_new_session=True,
        )


def is_running(log: Path) -> bool:
    """Whether a process of the trial with this log still runs, also one of a killed search."""
    return lock.is_locked(log)
