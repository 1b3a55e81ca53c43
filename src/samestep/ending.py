"""How a run ends, for those who look at it later: its state, its report, its copy."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
from omegaconf import DictConfig

from samestep.callbacks.last_checkpoint import LastCheckpoint
from samestep.callbacks.run_state import progress_of
from samestep.errors import ConfigError
from samestep.ranks import environment, failure
from samestep.ranks.stopping import Stopped
from samestep.report import page
from samestep.run import artifacts, directory, state
from samestep.run.summary import command_to_go_on

log = logging.getLogger(__name__)

NO_CHECKPOINT = (
    "Note: this run keeps no checkpoint, because no callback is a LastCheckpoint. If it is "
    "interrupted, it begins anew. A file of configs/callbacks gets one by `defaults: - default`."
)
REPORT_S = 10.0  # for the report of a run that was stopped: what stopped it waits no longer


@contextmanager
def recorded(cfg: DictConfig, trainer: L.Trainer) -> Iterator[None]:
    """Leave state and report of a run when this block ends, and let its copy be completed.

    Every rank enters it after ``nodes.begin``; rank zero writes. The checkpoint of a run that is
    stopped is saved before. A ConfigError undoes the start of the run, so that nothing is left:
    only a step shows some mistakes, such as a metric that the model does not log. A run that keeps
    no checkpoint says so when the block begins.

    Raises:
        Whatever the block raises.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    is_kept = any(isinstance(callback, LastCheckpoint) for callback in callbacks)
    if trainer.is_global_zero and not is_kept and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        print(NO_CHECKPOINT, flush=True)
    try:
        yield
    except BaseException as error:
        if trainer.is_global_zero:
            record_interruption(cfg, trainer, error)
        raise
    else:
        if trainer.is_global_zero:
            page.write_if_wanted(cfg)
    finally:
        artifacts.flush(trainer)


def record_interruption(cfg: DictConfig, trainer: L.Trainer, error: BaseException) -> None:
    """Write why a run has ended before its end, and say how a run that was stopped goes on."""
    ended, why = state.STOPPED, type(error).__name__  # a second Ctrl-C
    if isinstance(error, Stopped):
        why = error.name
    elif failure.is_lost_connection(error):
        ended, why = state.FAILED, f"rank {environment.rank()} {failure.LOST}"
    elif isinstance(error, Exception):
        ended, why = state.FAILED, failure.message(error).removeprefix(failure.PREFIX)
    state.record(Path(cfg.run_dir), ended, why, **progress_of(trainer))
    # A cluster starts the run again by itself.
    if isinstance(error, Stopped) and environment.variable(environment.ON_CLUSTER) is None:
        print(f"To continue: {command_to_go_on(cfg, Path(cfg.run_dir), None)}", flush=True)
    if isinstance(error, ConfigError):
        directory.abandon(cfg)
    elif isinstance(error, (Stopped, Exception)):
        write_in_time(cfg)


def write_in_time(cfg: DictConfig) -> None:
    """Write the report, but end after ``REPORT_S`` at the latest."""
    writer = threading.Thread(target=page.write_if_wanted, args=(cfg,), daemon=True)
    writer.start()
    writer.join(REPORT_S)
    if writer.is_alive():
        command = f"python scripts/report.py {cfg.run_dir}"
        log.warning("No report after %.0f s. `%s` writes it", REPORT_S, command)
