"""Run one trial as a cluster job, with the exit codes of ``train.py``.

SIGTERM cancels the job, which saves first.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from samestep.errors import ConfigError, RunError
from samestep.launch import main as launch
from samestep.ranks import failure, process

TRIES, WAIT_S = 6, 60  # if the cluster does not answer


def main(overrides: Sequence[str]) -> int:
    """Submit the run named ``$RUN_ID`` or find it, print its output, and return its exit code."""
    # Raises KeyboardInterrupt in whatever waits for the cluster at that moment.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return submit_and_follow(overrides)
    except ConfigError as error:
        return failure.report(error)
    except KeyboardInterrupt:
        # A second signal must not interrupt the cancellation: the job would train on.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with suppress(ConfigError, RunError):
            # Prepared again: the signal may have come before the first time was over.
            cfg, manifests = launch.prepare(overrides)
            launch.call_cluster("cancel", cfg, overrides, manifests)
        return failure.EXIT_SIGTERM


def submit_and_follow(overrides: Sequence[str]) -> int:
    """Submit the run, follow its output, and return its exit code; six tries if this fails."""
    cfg, manifests = launch.prepare(overrides)
    for _ in range(TRIES):
        try:
            # A submit of a run that is there changes nothing, so each try may begin with it.
            exit_code = launch.main(overrides)
            if exit_code == 0:
                exit_code = launch.call_cluster("logs", cfg, overrides, manifests)
            return exit_code
        except RunError as error:
            exit_code = failure.report(error)
        time.sleep(WAIT_S)
    return exit_code


if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:]))
