"""The life of a run, in one directory: it begins or resumes, is interrupted, and finishes.

``begin``             every rank: the checkpoint to resume from, or that nothing is left to train
``recorded``          every rank: a block that trains; how it ends is recorded
``finish``            rank zero: the final metrics end the run
``roll_back``         rank zero: undo a start with which nothing could be trained
``best_checkpoint``   every rank: which weights are tested; otherwise ``last_checkpoint``

The files of the directory are listed in ``layout``.
"""

import errno
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from samestep.errors import ConfigError, remedy_of
from samestep.option_names import option, setting
from samestep.ranks import environment, failure, output
from samestep.ranks.meeting import is_shared
from samestep.ranks.process_group import on_rank_zero
from samestep.ranks.secrets import redact, redact_argument, redact_values
from samestep.ranks.stopping import Interrupted, Stopped
from samestep.run import lock, manifest, phases, record
from samestep.run.changes import config_digest, find_changes, show_change
from samestep.run.checkpoint import find_valid, unusable
from samestep.run.copies import KeepsCopy, fetch_newest, replicate
from samestep.run.files import (
    quarantine,
    read_bytes,
    sha256_of,
    write_if_changed,
    write_text,
    writing,
)
from samestep.run.layout import BEST, LAST, RECORDS, TIME, shorten
from samestep.run.metrics import read_final_metrics, why_damaged
from samestep.run_spec import RunSpec

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
REPORT_S = 10.0  # for the report of a run that was stopped: what stopped it waits no longer
PROGRESS = ("epoch", "step", "monitor", "mode", "best", "best_epoch", "shares")  # in run.json


class Start(NamedTuple):
    """How a process starts: with nothing left to train, from a checkpoint, or from step 0."""

    finished: bool
    ckpt_path: str | None  # to resume from; None where the run begins


class Backup(NamedTuple):
    """What a start must leave behind if it never saves a checkpoint."""

    made: list[Path]  # folders that are new: the run directory, and those above it
    records: dict[Path, bytes | None]  # of an older run
    last: manifest.Manifest | None  # of its last checkpoint


_backups: dict[Path, Backup] = {}  # by run directory


# -- Begin -----------------------------------------------------------------------------------------


def begin(
    spec: RunSpec,
    argv: list[str],
    copies: Sequence[KeepsCopy] = (),
    plugins: Iterable[Any] = (),
) -> Start:
    """Open the run on rank zero, and give every node the checkpoint from which it resumes.

    Every rank must call this, and gets the same error.

    Args:
        spec: of the run.
        argv: the command line, for the records.
        copies: the callbacks that keep copies of the run.
        plugins: those that note a start.
    """
    if spec.is_fsdp and not is_shared(spec.run_dir):
        raise ConfigError(
            f"run_dir={spec.run_dir}: is not shared between the nodes, and with "
            f"{setting('strategy', 'fsdp')} each rank writes a part of a checkpoint; use a "
            f"shared directory, or {setting('strategy', 'ddp')}"
        )
    with phases.spend(phases.SEARCH):
        fetch_newest(spec)
    start = on_rank_zero(open_directory, spec, argv, copies, plugins)
    if start.ckpt_path is None:
        return start
    name = f"checkpoints/{Path(start.ckpt_path).name}"
    with phases.spend(phases.SEARCH):
        replicate(spec.run_dir, [BEST, name])
    return start._replace(ckpt_path=str(spec.run_dir / name))


def open_directory(
    spec: RunSpec,
    argv: list[str],
    copies: Sequence[KeepsCopy] = (),
    plugins: Iterable[Any] = (),
) -> Start:
    """Open the run directory, new or old; on rank zero only. The arguments are those of ``begin``.

    The results of a finished run stay until the run that continues has new ones.
    """
    run_dir = spec.run_dir
    # Without the lock: a finished run may be where nothing can be written.
    if is_finished(spec) and not find_changes(spec):
        return Start(finished=True, ckpt_path=None)
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        lock.acquire(run_dir)
        if [path.name for path in run_dir.iterdir()] != [lock.FILE]:
            # Another process has begun the same run meanwhile, and has left it again.
            made = []
        _back_up(run_dir, made)
        for copy in copies:
            copy.fetch(run_dir)
            _back_up(run_dir, made)
        # Asked again: before the lock was held, another process may have trained.
        changed = find_changes(spec)
        if is_finished(spec):
            return Start(finished=True, ckpt_path=None)
        last = _open(spec, argv, plugins)
    except ConfigError:
        roll_back(run_dir)
        raise
    except OSError as error:
        roll_back(run_dir)
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {error.strerror}; {remedy_of(error)}, or choose "
            f"another directory with {option('run_dir')}=..."
        ) from error
    _announce(run_dir, last, changed)
    return Start(finished=False, ckpt_path=last)


def _announce(run_dir: Path, last: str | None, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Print that a run starts or continues, and what differs from its last start."""
    start = "Continuing" if last else "Run"
    print(f"{start}: {shorten(run_dir)}", flush=True)
    for key, pair in changed.items():
        print(f"  {key}: {show_change(pair)}", flush=True)


def _back_up(run_dir: Path, made: list[Path]) -> None:
    """Keep for ``roll_back`` what is in the directory, which this process owns."""
    records = {run_dir / name: read_bytes(run_dir / name) for name in (*RECORDS, TIME)}
    _backups[run_dir.absolute()] = Backup(made, records, manifest.read(run_dir / LAST))


def roll_back(run_dir: Path) -> None:
    """Undo what ``begin`` has written for a run that cannot be trained; on rank zero only.

    A run directory that ``begin`` has made is removed. An older one gets its records back. If a
    checkpoint was saved since, everything stays.
    """
    backup = _backups.pop(run_dir.absolute(), None)
    phases.switch(phases.AWAY)
    if backup is None or manifest.read(run_dir / LAST) != backup.last:
        return
    if not backup.made:
        for path, content in backup.records.items():
            # On a full disk nothing was replaced, and nothing can be.
            write_if_changed(path, content)
        return
    # Under its own name it would be emptied while another process begins in there.
    removed = run_dir.with_name(f".{run_dir.name}.removed-{os.getpid()}")
    with suppress(OSError):
        run_dir.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    lock.forget(run_dir)
    # A folder above may hold another run by now, and then stays.
    with suppress(OSError):
        for folder in backup.made[1:]:
            folder.rmdir()


def _open(spec: RunSpec, argv: list[str], plugins: Iterable[Any]) -> str | None:
    """Check what is in the directory, and record this start; returns the newest checkpoint."""
    run_dir = spec.run_dir
    known = record.read(run_dir)
    _quarantine_damaged(run_dir, known)
    with phases.spend(phases.SEARCH):
        found = find_valid(run_dir / "checkpoints", known._replace(run_id=spec.run_id))
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    forgotten: dict[str, Any] = {}
    if found is None:
        # Without a checkpoint the run starts over.
        (run_dir / "metrics.csv").unlink(missing_ok=True)
        forgotten = dict.fromkeys(PROGRESS)
    text = yaml.safe_dump(dict(spec.config), allow_unicode=True, sort_keys=False)
    write_text(run_dir / "config.yaml", text)
    starts = [*map(dict, known.starts), _describe_start(spec, argv)]
    for plugin in plugins:
        plugin.note_start(spec, starts, found[1].global_step if found else 0)
    starts[-1] = redact_values(starts[-1])
    record.update(
        run_dir,
        record.RUNNING,
        run_id=spec.run_id,
        limits={name: _number_of(limit) for name, limit in spec.limits.items()},
        # The results of before stay in metrics.json, and are no longer those of this run.
        results=None,
        notes=redact(str(spec.config.get("notes") or known.notes)),
        tags=[redact(str(tag)) for tag in spec.config.get("tags") or known.tags],
        starts=starts,
        **forgotten,
    )
    return str(found[0]) if found else None


def _quarantine_damaged(run_dir: Path, known: record.Record) -> None:
    """Rename files of metrics that cannot be read, or that another run has written."""
    # A history that cannot be read is in the checkpoint too. It is written again from there.
    why = why_damaged(run_dir)
    if why:
        quarantine(run_dir / "metrics.csv", why)
    path = run_dir / "metrics.json"
    if not path.exists():
        return
    if read_final_metrics(run_dir) is None:
        quarantine(path, "it holds no JSON object")
    elif known.results and not _has_results(run_dir, known):
        quarantine(path, "it was not written by this run")


def _has_results(run_dir: Path, known: record.Record) -> bool:
    """Whether ``metrics.json`` is the one with which the run has finished."""
    path = run_dir / "metrics.json"
    return path.is_file() and sha256_of(path) == known.results


def _describe_start(spec: RunSpec, argv: list[str]) -> dict[str, Any]:
    """What run.json keeps of this start, beside what plug-ins add."""
    return {
        "command": [*map(redact_argument, argv)],
        "config": config_digest(spec),
        "overridden": dict(spec.overridden),
        "seed": spec.seed,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


# -- Train, and be interrupted ---------------------------------------------------------------------


@contextmanager
def recorded(
    spec: RunSpec,
    progress: Callable[[], Mapping[str, Any]],
    *,
    ends_run: bool = True,
) -> Iterator[None]:
    """Leave state and report of a run when this block ends.

    Every rank enters it after ``begin``; rank zero writes. The checkpoint of a run that is stopped
    is saved before. A ConfigError rolls the start back. Some mistakes show only while training,
    such as a metric that is never logged.

    Args:
        spec: of the run.
        progress: how far the run is, for ``run.json``.
        ends_run: whether the report is due when the block succeeds; otherwise another block
            follows.

    Raises:
        Whatever the block raises.
    """
    is_rank_zero = environment.rank() == 0
    try:
        yield
    except BaseException as error:
        if is_rank_zero:
            record_interruption(spec, error, progress())
            # At a second Ctrl-C, which is Interrupted, nobody waits for a report.
            may_wait = isinstance(error, (Stopped, Exception))
            if may_wait and spec.run_dir.exists():
                write_in_time(spec.run_dir, spec.report)
        raise
    else:
        if is_rank_zero and ends_run:
            spec.report(spec.run_dir)


def record_interruption(spec: RunSpec, error: BaseException, progress: Mapping[str, Any]) -> None:
    """Write why a run has ended before its end, and say how to continue a run that was stopped."""
    state, why = record.STOPPED, type(error).__name__
    if isinstance(error, Interrupted):
        why = "a second Ctrl-C"
    elif isinstance(error, Stopped):
        why = error.name
    elif failure.is_lost_connection(error):
        state, why = record.FAILED, f"rank {environment.rank()} {failure.LOST}"
    elif isinstance(error, Exception):
        state, why = record.FAILED, failure.message(error).removeprefix(failure.PREFIX)
    record.try_to_update(spec.run_dir, state, why, **progress)
    # A cluster starts the run again by itself.
    if isinstance(error, Stopped) and environment.variable(environment.ON_CLUSTER) is None:
        output.say(f"To continue: {spec.resume_command(spec)}")
    if isinstance(error, ConfigError):
        roll_back(spec.run_dir)


def write_in_time(run_dir: Path, report: Callable[[Path], None]) -> None:
    """Write the report, but end after ``REPORT_S`` at the latest."""
    writer = threading.Thread(target=report, args=(run_dir,), daemon=True)
    writer.start()
    writer.join(REPORT_S)
    if writer.is_alive():
        command = f"samestep report {shorten(run_dir)}"
        log.warning("No report after %.0f s. `%s` writes it", REPORT_S, command)


@contextmanager
def full_disk_is_one_message(run_dir: Path) -> Iterator[None]:
    """Turn the errors of a full disk within this block into one message."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        with writing(Path(error.filename or run_dir)):
            raise


# -- Finish ----------------------------------------------------------------------------------------


def finish(spec: RunSpec, metrics: Mapping[str, float | None]) -> None:
    """Write ``metrics.json``, which ends the run; on rank zero only.

    Values that are not numbers are null in the file, and warned about.
    """
    path = spec.run_dir / "metrics.json"
    finite: dict[str, float | None] = dict(metrics)
    odd = []
    for name in sorted(metrics):
        value = metrics[name]
        if value is None or not math.isfinite(value):
            finite[name] = None
            odd.append(name)
    write_text(path, json.dumps(finite, indent=2, sort_keys=True) + "\n")
    record.update(spec.run_dir, record.FINISHED, results=sha256_of(path))
    if odd:
        text = "%s: not a number, and null in metrics.json; check the data for nan"
        log.warning(text, ", ".join(odd))


def is_finished(spec: RunSpec) -> bool:
    """Whether the run has its results, and ``spec`` does not ask to train it longer."""
    known = record.read(spec.run_dir)
    if known.run_id != spec.run_id or not _has_results(spec.run_dir, known):
        return False
    for name, before in known.limits.items():
        now = _number_of(spec.limits.get(name))
        # None is no limit.
        is_higher = before is not None and (now is None or now > before)
        if is_higher:
            return False
    return True


def _number_of(limit: Any) -> float | None:
    """A limit as a number, times in seconds; None and -1 are no limit."""
    if limit in (None, -1):
        return None
    # max_time of the Trainer has three forms: "00:12:00:00", a mapping, and a timedelta.
    if isinstance(limit, str):
        days, hours, minutes, seconds = map(int, limit.split(":"))
        limit = timedelta(days, seconds, hours=hours, minutes=minutes)
    if isinstance(limit, Mapping):
        limit = timedelta(**limit)
    if isinstance(limit, timedelta):
        return limit.total_seconds()
    return float(limit)


# -- What is tested --------------------------------------------------------------------------------


def best_checkpoint(spec: RunSpec) -> str | None:
    """The path on this node of the checkpoint to test; every rank must call this.

    None where no metric has chosen one: the last one is tested then.
    """
    if on_rank_zero(find_best, spec.run_dir) is None:
        return None
    replicate(spec.run_dir, [BEST])
    return str(spec.run_dir / BEST)


def last_checkpoint(spec: RunSpec) -> str | None:
    """The path on this node of ``last.ckpt``, if there is one; every rank must call this."""
    if not on_rank_zero((spec.run_dir / LAST).exists):
        return None
    replicate(spec.run_dir, [LAST])
    return str(spec.run_dir / LAST)


def find_best(run_dir: Path) -> str | None:
    """The best checkpoint in a run directory; None where no metric has chosen one.

    Raises:
        CheckpointError: if it is lost. Other weights never take its place.
    """
    path, newest = run_dir / BEST, manifest.newest(run_dir)
    if newest is None or newest.best_step is None:
        return None
    best, step = manifest.read(path), newest.best_step
    if best is None:
        raise unusable(
            path, f"it is missing, or damaged, and the best checkpoint is from step {step}"
        )
    if best.global_step != step:
        why = f"it is from step {best.global_step}, and the best checkpoint is from step {step}"
        raise unusable(path, why)
    return str(path)
