"""The log of each rank, ``logs/rank-<n>.log``: all log records and warnings of all libraries."""

import logging
import warnings
from pathlib import Path

import lightning as L

from samestep.ranks import environment, secrets
from samestep.run.files import quarantine

log = logging.getLogger(__name__)

EXPECTED = (  # warnings that users cannot act on
    ".*treespec, LeafSpec.*",  # Lightning calls torch's pytree by its old name
    "The number of training batches .* is smaller than the logging interval.*",  # none per step
    "Grad strides do not match bucket view strides.*",  # DDP with inputs of one channel; harmless
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # supported here
    "Checkpoint directory .* exists and is not empty.*",  # a resumed run
    ".*does not have many workers.*",  # data in memory need none
    "The `srun` command is available on your system.*",  # one process needs no srun
    ".*all_gather is deprecated.*",  # which Lightning calls
)


class _Redacted(logging.Formatter):
    """A log line without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return secrets.redact(super().format(record))


def mute_lightning() -> None:
    """Remove Lightning's log handlers, and warnings that users cannot act on."""
    # Its handlers print to stderr. Without them all records reach the root logger, and one file.
    for library in (L, L.pytorch, L.fabric):
        logger = logging.getLogger(library.__name__)
        logger.handlers.clear()
        logger.propagate = True
    silence_expected_warnings()


def silence_expected_warnings() -> None:
    """Ignore warnings that users cannot act on."""
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message)


def log_to_files(run_dir: Path) -> None:
    """Append all log records and warnings to ``logs/rank-<n>.log`` of this rank.

    Rank zero also prints warnings and errors to stderr.
    """
    mute_lightning()
    root = logging.getLogger()
    # A sweep trains several runs in one process, and each of them has its own file.
    for old in list(root.handlers):
        if old.name == __name__:
            root.removeHandler(old)
            old.close()
    path = run_dir / "logs" / f"rank-{environment.rank()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = []
    if environment.rank() == 0:
        screen = logging.StreamHandler()
        screen.setFormatter(_Redacted("%(levelname)s: %(message)s"))
        screen.setLevel(logging.WARNING)
        handlers.append(screen)
    # A full disk then loses lines of the log, without a traceback for each.
    logging.raiseExceptions = False
    try:
        if path.exists() and not path.is_file():
            quarantine(path, "it is not a file")
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(_Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    except OSError as error:
        log.warning("%s cannot be written: %s; the run continues without it", path, error.strerror)
    for handler in handlers:
        handler.set_name(__name__)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
