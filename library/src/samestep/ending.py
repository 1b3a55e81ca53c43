"""How a run ends, for those who inspect it later: its state, its report, its copy."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L

from samestep.callbacks.checkpoints import Checkpoints, progress_of
from samestep.errors import ConfigError
from samestep.ranks import environment, failure
from samestep.ranks.compat import callbacks_of
from samestep.ranks.stopping import Stopped
from samestep.run import artifacts, directory, record
from samestep.run_spec import RunSpec

log = logging.getLogger(__name__)

NO_CHECKPOINT = (
    "Note: this run keeps no checkpoint, because no callback is a Checkpoints. If it is "
    "interrupted, it starts over. Add `defaults: - default` to the file in configs/callbacks."
)
REPORT_S = 10.0  # for the report of a run that was stopped: what stopped it waits no longer


@contextmanager
def recorded(
    spec: RunSpec,
    trainer: L.Trainer,
    *,
    again: str = "the same command",
    report: Callable[[Path], None] | None = None,
) -> Iterator[None]:
    """Leave state and report of a run when this block ends, and let its copy be completed.

    Every rank enters it after ``nodes.begin``; rank zero writes. The checkpoint of a run that is
    stopped is saved before. A ConfigError undoes the start of the run, so that nothing is left:
    only a step shows some mistakes, such as a metric that the model does not log. A run that keeps
    no checkpoint says so when the block begins.

    Args:
        spec: of the run.
        trainer: that trains it.
        again: what the user types to continue a run that was stopped.
        report: writes a report of the run directory; None writes none.

    Raises:
        Whatever the block raises.
    """
    is_kept = callbacks_of(trainer, Checkpoints)
    if trainer.is_global_zero and not is_kept and not spec.saves_nothing:
        print(NO_CHECKPOINT, flush=True)
    try:
        yield
    except BaseException as error:
        if trainer.is_global_zero:
            record_interruption(spec.run_dir, trainer, error, again)
            if report and isinstance(error, (Stopped, Exception)) and spec.run_dir.exists():
                write_in_time(spec.run_dir, report)
        raise
    else:
        if trainer.is_global_zero and report:
            report(spec.run_dir)
    finally:
        artifacts.flush(trainer)


def record_interruption(
    run_dir: Path, trainer: L.Trainer, error: BaseException, again: str
) -> None:
    """Write why a run has ended before its end, and say how to continue a run that was stopped."""
    ended, why = record.STOPPED, type(error).__name__  # a second Ctrl-C
    if isinstance(error, Stopped):
        why = error.name
    elif failure.is_lost_connection(error):
        ended, why = record.FAILED, f"rank {environment.rank()} {failure.LOST}"
    elif isinstance(error, Exception):
        ended, why = record.FAILED, failure.message(error).removeprefix(failure.PREFIX)
    record.try_to_update(run_dir, ended, why, **progress_of(trainer))
    # A cluster starts the run again by itself.
    if isinstance(error, Stopped) and environment.variable(environment.ON_CLUSTER) is None:
        print(f"To continue: {again}", flush=True)
    if isinstance(error, ConfigError):
        directory.abandon(run_dir)


def write_in_time(run_dir: Path, report: Callable[[Path], None]) -> None:
    """Write the report, but end after ``REPORT_S`` at the latest."""
    writer = threading.Thread(target=report, args=(run_dir,), daemon=True)
    writer.start()
    writer.join(REPORT_S)
    if writer.is_alive():
        command = f"samestep report {run_dir}"
        log.warning("No report after %.0f s. `%s` writes it", REPORT_S, command)
