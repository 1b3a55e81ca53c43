"""The loop that polls a cluster: for logs, and until a run has gone."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from samestep.errors import RunError

POLL_S = 1.0
RETRIES = 60  # polls without an answer before we give up; a cluster may be upgraded

EXTRA_S = 60  # seconds that pods and jobs may take to end, beyond their grace period

Answer = TypeVar("Answer")


def poll(ask: Callable[[], Answer], limit_s: float = float("inf")) -> Iterator[Answer]:
    """Yield an answer every second, for ``limit_s`` seconds.

    Raises:
        RunError: if the first call of ``ask`` raises one, or more than ``RETRIES`` in a row do.
    """
    deadline = time.monotonic() + limit_s
    # As if all retries had failed: an error of the first call is one of the command, not of a
    # cluster that is away for a moment.
    failures = RETRIES
    while True:
        try:
            answer = ask()
        except RunError:
            failures += 1
            if failures > RETRIES:
                raise
        else:
            failures = 0
            yield answer
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def print_once(lines: Sequence[str], printed: set[str]) -> None:
    """Print each line that is not in ``printed`` to stderr: stdout is for the logs of the run."""
    for line in lines:
        if line not in printed:
            print(line, file=sys.stderr, flush=True)
            printed.add(line)
