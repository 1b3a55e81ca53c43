"""One run, one directory: beginning it, continuing it, finishing it, reading it back.

runs/<run_id>/
    config.yaml        the whole configuration, resolved, without secrets
    run.json           state, starts and ends
    metrics.json       the final metrics
    metrics.csv        the metrics over time
    checkpoints/       best.ckpt to test, last.ckpt to continue from, epoch-0002.ckpt and so on
                       to keep
    predictions/       pictures of test results
    logs/              git.diff, rank-<n>.log
    report.html        all of this to look at
"""

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from samestep.errors import ConfigError
from samestep.ranks.secrets import redact_argument, redact_values
from samestep.run import lock, provenance, record, seal
from samestep.run.changes import config_digest, find_changes
from samestep.run.files import open_atomic, read_bytes, set_aside, sha256_of, write_text
from samestep.run.identity import Identity, read_identity
from samestep.run.metrics import read_figures, why_damaged
from samestep.spec import RunSpec

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

BEST, LAST = "checkpoints/best.ckpt", "checkpoints/last.ckpt"
RECORDS = (
    "config.yaml", "metrics.csv", record.FILE, "logs/git.diff",
)  # fmt: skip


class Start(NamedTuple):
    """How a process starts: with nothing left to train, from a checkpoint, or anew."""

    finished: bool
    ckpt_path: str | None  # to continue from; None where the run begins


class Before(NamedTuple):
    """What was there before ``begin`` opened a run directory."""

    missing: list[Path]  # the run directory, and the folders above it, if they were not there
    files: dict[Path, bytes | None]  # the records; None: there was no such file
    last: seal.Seal | None  # of the last checkpoint


_before: dict[Path, Before] = {}  # by run directory, as begin found it


def begin(spec: RunSpec, argv: list[str], copies: str | None = None) -> Start:
    """Open the run directory, new or old, of the command line ``argv``; on rank zero only.

    The results of a finished run stay until the run that continues has new ones. ``copies`` is the
    address of the store that has copies of the runs, if there is one.

    Raises:
        ConfigError: if the directory holds another run, or cannot be written.
        CheckpointError: if it holds checkpoints, and none of them can be used.
    """
    run_dir = spec.run_dir
    if is_finished(spec) and not find_changes(spec):
        return Start(finished=True, ckpt_path=None)  # which may be where nobody can write
    try:
        _lock_directory(run_dir)
        if copies:
            _fetch_copy(copies, run_dir)
        # What is true before the lock, another process may change.
        changed = find_changes(spec)
        if is_finished(spec):
            return Start(finished=True, ckpt_path=None)
        last = _open(spec, argv)
    except ConfigError:
        abandon(run_dir)
        raise
    except OSError as error:
        abandon(run_dir)
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {error.strerror}; make room or get permission "
            "there, or choose another directory with run_root=..."
        ) from error
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    print(f"{'Continuing' if last else 'Run'}: {run_dir}", *lines, sep="\n", flush=True)
    return Start(finished=False, ckpt_path=str(last) if last else None)


@contextmanager
def full_disk_is_one_message(run_dir: Path) -> Iterator[None]:
    """Turn the errors of a full disk within this block into one message."""
    from samestep.run.checkpoint import cannot_write

    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise cannot_write(Path(error.filename or run_dir), error) from error


def abandon(run_dir: Path) -> None:
    """Undo what ``begin`` has written for a run that cannot be run; on rank zero only.

    A run directory that ``begin`` has made is removed. In an older one the records become those of
    before. If a checkpoint was saved since, everything stays.
    """
    before = _before.pop(run_dir.absolute(), None)
    if before is None:
        return
    if seal.read(run_dir / LAST) != before.last:
        return
    if not before.missing:
        for path, content in before.files.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif content != read_bytes(path):
                with open_atomic(path) as file:
                    file.write(content)
        return
    # Under its own name it would be emptied while another process begins in there.
    removed = run_dir.with_name(f".{run_dir.name}.removed-{os.getpid()}")
    with suppress(OSError):
        run_dir.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    lock.forget(run_dir)
    for folder in before.missing[1:]:
        try:
            folder.rmdir()
        except OSError:
            return  # another run has begun in there


def is_finished(spec: RunSpec) -> bool:
    """Whether the run has its results, and ``spec`` does not ask to train it longer."""
    known = record.read(spec.run_dir)
    path = spec.run_dir / "metrics.json"
    if known.run_id != spec.run_id or not path.is_file() or sha256_of(path) != known.results:
        return False
    new = {name: _number_of(limit) for name, limit in spec.limits.items()}
    pairs = [(known.limits.get(name), new.get(name)) for name in {**known.limits, **new}]
    # None is no limit.
    return not any(a is not None and (b is None or b > a) for a, b in pairs)


def tested_checkpoint(run_dir: Path) -> str:
    """The checkpoint that a run tests: ``best``, or ``last`` where no metric has chosen one."""
    newest = _newest_seal(run_dir)
    # A best checkpoint that is lost is not replaced by other weights.
    return "last" if newest and newest.best_step is None else "best"


def best_checkpoint(run_dir: Path) -> str | None:
    """The best checkpoint; None where no metric has chosen one: the last one is tested then.

    Raises:
        CheckpointError: if the best checkpoint is missing, or another one is in its place.
    """
    from samestep.run.checkpoint import refused

    path, newest = run_dir / BEST, _newest_seal(run_dir)
    if newest is None or newest.best_step is None:
        return None
    best, step = seal.read(path), newest.best_step
    if best and best.global_step == step:
        return str(path)
    why = f"it is of step {best.global_step}" if best else "it is missing, or damaged"
    error = refused(path, f"{why}, and the best checkpoint is of step {step}")
    error.on_all_ranks = True
    raise error


def finish(spec: RunSpec, metrics: Mapping[str, float | None]) -> None:
    """Write ``metrics.json``, which ends the run; on rank zero only.

    Values that are not numbers are null in the file, and warned about. ``trainer.fast_dev_run``
    leaves no such file.
    """
    path = spec.run_dir / "metrics.json"
    if spec.saves_nothing:
        # It has saved no weights. With results it would be a run, and keep its name from others.
        record.update(spec.run_dir, record.FINISHED)
        return
    finite = {n: v if v is not None and math.isfinite(v) else None for n, v in metrics.items()}
    write_text(path, json.dumps(finite, indent=2, sort_keys=True) + "\n")
    record.update(spec.run_dir, record.FINISHED, results=sha256_of(path))
    if odd := ", ".join(sorted(name for name in finite if finite[name] is None)):
        log.warning("%s: not a number, and null in metrics.json; look for nan in the data", odd)


def _newest_seal(run_dir: Path) -> seal.Seal | None:
    """The seal of the newest checkpoint, which says which one is the best."""
    seals = map(seal.read, (run_dir / "checkpoints").glob("[!.]*.ckpt"))
    return max(filter(None, seals), key=lambda found: found.age, default=None)


def _lock_directory(run_dir: Path) -> None:
    """Own the directory, and remember what was there before."""
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    lock.acquire(run_dir)
    # Another process may have begun the same run meanwhile, and left it again: then it is not new.
    is_new = missing and [path.name for path in run_dir.iterdir()] == [lock.FILE]
    files = {run_dir / name: read_bytes(run_dir / name) for name in RECORDS}
    last = seal.read(run_dir / LAST)
    _before[run_dir.absolute()] = Before(missing if is_new else [], files, last)


def _open(spec: RunSpec, argv: list[str]) -> Path | None:
    """Check what is in the directory, and record this start: the newest checkpoint."""
    from samestep.run.checkpoint import find_newest  # torch, which looking at runs does not need

    run_dir = spec.run_dir
    known = record.read(run_dir)
    # A history that cannot be read is in the checkpoint too. It is written again from there.
    if why := why_damaged(run_dir):
        set_aside(run_dir / "metrics.csv", why)
    path = run_dir / "metrics.json"
    if path.exists() and read_figures(run_dir) is None:
        set_aside(path, "it holds no JSON object")
    elif known.results and path.is_file() and sha256_of(path) != known.results:
        set_aside(path, "it is not what this run has written")
    last = find_newest(
        run_dir / "checkpoints", Identity(spec.run_id, read_identity(run_dir).configs)
    )
    for name in ("checkpoints", "logs"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    if last is None:
        (run_dir / "metrics.csv").unlink(missing_ok=True)
    text = yaml.safe_dump(dict(spec.config), allow_unicode=True, sort_keys=False)
    write_text(run_dir / "config.yaml", text)
    commit, diff = provenance.code_state(Path.cwd())
    write_text(run_dir / "logs/git.diff", diff)
    start = {
        "command": [redact_argument(argument) for argument in argv],
        "config": config_digest(spec),
        "overridden": dict(spec.overridden),
        "git": {"commit": commit, "dirty": bool(diff)},
        "seed": spec.seed,
        **(machine := provenance.surroundings()),
        # One text: a list of hundreds of lines would be slow to read, for people too.
        "packages": " ".join(f"{name}=={v}" for name, v in machine["packages"].items()),
    }
    starts = [dict(start) for start in known.starts]
    if starts and starts[-1].get("packages") == start["packages"]:
        del starts[-1]["packages"]  # the newest start has the same
    progress = ("epoch", "step", "monitor", "best", "best_epoch", "shares")
    begins_anew: dict[str, Any] = {} if last else dict.fromkeys(progress)
    record.update(
        run_dir,
        record.RUNNING,
        run_id=spec.run_id,
        limits={name: _number_of(limit) for name, limit in spec.limits.items()},
        results=None,  # those of before stay in metrics.json
        starts=[*starts, redact_values(start)],
        **begins_anew,
    )
    return last


def _fetch_copy(url: str, run_dir: Path) -> None:
    """Continue from the copy in a store, if no checkpoint is here or the copy has a newer one."""
    from samestep.run import store

    if list(run_dir.glob("checkpoints/*.ckpt")):
        store.fetch_newer(url, run_dir)
        return
    store.fetch(url, run_dir)
    before = _before[run_dir.absolute()]
    if before.missing:
        # What was fetched is still in the store, so `abandon` removes it with the directory.
        _before[run_dir.absolute()] = before._replace(last=seal.read(run_dir / LAST))


def _number_of(limit: Any) -> float | None:
    """A limit as a number, times in seconds; None and -1 are no limit."""
    if limit in (None, -1):
        return None
    if isinstance(limit, str):  # trainer.max_time, such as 00:12:00:00
        days, hours, minutes, seconds = map(int, limit.split(":"))
        limit = timedelta(days, seconds, hours=hours, minutes=minutes)
    if isinstance(limit, Mapping):
        limit = timedelta(**limit)
    return limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
