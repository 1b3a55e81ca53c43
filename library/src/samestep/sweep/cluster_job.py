"""Be the process of a trial that a cluster trains, with the exit codes of ``train.py``.

SIGTERM cancels its job, which saves first.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from samestep.errors import ConfigError, RunError
from samestep.launch import main as launch
from samestep.ranks import environment, failure, process

TRIES, WAIT_S = 6, 60  # of a cluster that does not answer


def main(overrides: Sequence[str]) -> int:
    """Submit the run named ``$RUN_ID`` or find it, print its output, and return its exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    name = environment.run_id() or ""  # the search sets it
    try:
        for _ in range(TRIES):
            try:
                return launch.main(overrides) or launch.logs([name])
            except RunError as error:
                exit_code = failure.report(error)
            time.sleep(WAIT_S)
        return exit_code
    except ConfigError as error:
        return failure.report(error)
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing may interrupt the cancellation
        with suppress(ConfigError, RunError):
            launch.cancel([name])
        return failure.EXIT_SIGTERM


if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:]))
