"""One run, one directory: beginning it, continuing it, finishing it, reading it back.

runs/<run_id>/
    config.yaml        the whole configuration, resolved, without secrets
    metrics.json       the final metrics
    metrics.csv        the metrics over time
    checkpoints/       best.ckpt to test, last.ckpt to continue from, epoch-0002.ckpt and so on
                       to keep
    predictions/       pictures of test results
    logs/              environment.json, state.json, finished.json, git.diff, rank-<n>.log
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
from samestep.run import lock, seal, state
from samestep.run.changes import config_digest, find_changes
from samestep.run.files import put_back, read_bytes, set_aside, sha256_of, write_text
from samestep.run.identity import Identity, read_identity
from samestep.run.records import read_json, record_attempt, why_damaged
from samestep.spec import RunSpec

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
FINISHED = "logs/finished.json"  # of which run metrics.json is, and how long that was

BEST, LAST = "checkpoints/best.ckpt", "checkpoints/last.ckpt"
RECORDS = (
    "config.yaml", "metrics.csv", "logs/environment.json", "logs/git.diff", FINISHED, state.STATE,
)  # fmt: skip


class Start(NamedTuple):
    """How a process starts: with nothing left to train, from a checkpoint, or anew."""

    finished: bool
    ckpt_path: str | None  # to continue from; None where the run begins


FINISHED_START = Start(finished=True, ckpt_path=None)


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
    find_changes(spec)  # a run that is rejected, or finished, is not even locked
    if is_finished(spec):
        return FINISHED_START
    try:
        _lock_directory(run_dir)
        if copies:
            _fetch_copy(copies, run_dir)
        # Another process may have begun or finished the run before this one could lock it.
        changed = find_changes(spec)
        if is_finished(spec):
            return FINISHED_START
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
            put_back(path, content)
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
    finished = read_json(spec.run_dir / FINISHED, dict) or {}
    path = spec.run_dir / "metrics.json"
    if finished.get("run_id") != spec.run_id or not path.is_file():
        return False
    if sha256_of(path) != finished.get("sha256"):
        return False
    old, new = finished.get("limits", {}), spec.limits
    return not any(_is_further(old.get(key), new.get(key)) for key in old | new)


def best_checkpoint(run_dir: Path) -> str | None:
    """The checkpoint to test; None where none was the best one, as in ``debug=fast``.

    Raises:
        CheckpointError: if the best checkpoint is missing, or another one is in its place.
    """
    from samestep.run.checkpoint import refused

    path = run_dir / BEST
    seals = [found for found in map(seal.read, path.parent.glob("[!.]*.ckpt")) if found]
    # The newest checkpoint says which one is the best.
    step = max(seals, key=lambda found: found.age).best_step if seals else None
    if step is None:
        return None
    best = seal.read(path)
    if best and best.global_step == step:
        return str(path)
    why = f"it is of step {best.global_step}" if best else "it is missing, or damaged"
    error = refused(path, f"{why}, and the best checkpoint is of step {step}")
    error.on_all_ranks = True
    raise error


def finish(spec: RunSpec, metrics: Mapping[str, float]) -> None:
    """Write ``metrics.json``, which ends the run; on rank zero only.

    Values that are not numbers are null in the file, and warned about. ``trainer.fast_dev_run``
    leaves no such file.
    """
    run_dir = spec.run_dir
    if spec.saves_nothing:
        # It has saved no weights. With results it would be a run, and keep its name from others.
        state.record(run_dir, state.FINISHED)
        return
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    text = json.dumps(finite, indent=2, sort_keys=True) + "\n"
    write_text(run_dir / "metrics.json", text)
    finished = {
        "run_id": spec.run_id,
        "sha256": sha256_of(run_dir / "metrics.json"),
        "limits": dict(spec.limits),
    }
    write_text(run_dir / FINISHED, json.dumps(finished) + "\n")
    state.record(run_dir, state.FINISHED)
    if odd := ", ".join(sorted(name for name in finite if finite[name] is None)):
        log.warning("%s: not a number, and null in metrics.json; look for nan in the data", odd)


def read_figures(run_dir: Path) -> dict[str, float]:
    """The figures of ``metrics.json``; null stands for values that are no numbers."""
    figures = read_json(run_dir / "metrics.json", dict) or {}
    return {name: math.nan if value is None else value for name, value in figures.items()}


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
    set_damaged_aside(run_dir)
    known = read_identity(run_dir)
    last = find_newest(run_dir / "checkpoints", Identity(spec.run_id, known.configs))
    for name in ("checkpoints", "logs"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    # The run has no new results yet. Those of before stay in metrics.json.
    (run_dir / FINISHED).unlink(missing_ok=True)
    if last is None:
        (run_dir / "metrics.csv").unlink(missing_ok=True)
    text = yaml.safe_dump(dict(spec.config), allow_unicode=True, sort_keys=False)
    write_text(run_dir / "config.yaml", text)
    identity = {"run_id": spec.run_id, "config": config_digest(spec)}
    facts = {**identity, "overridden": dict(spec.overridden)}
    record_attempt(run_dir / "logs", argv, spec.seed, facts)
    unknown = dict.fromkeys(("best", "best_epoch", "epoch", "step"))
    begins_anew: dict[str, Any] = {"monitor": "", **unknown}
    state.record(run_dir, state.RUNNING, **({} if last else begins_anew))
    return last


def set_damaged_aside(run_dir: Path) -> None:
    """Rename the records of a run that cannot be read: history, starts and results.

    The history is in the checkpoint too, so that the run that continues writes it again.
    """
    if why := why_damaged(run_dir):
        set_aside(run_dir / "metrics.csv", why)
    for name, kind in (("logs/environment.json", list), ("metrics.json", dict), (FINISHED, dict)):
        path = run_dir / name
        if path.exists() and read_json(path, kind) is None:
            set_aside(path, f"it holds no JSON {'list' if kind is list else 'object'}")
    finished = read_json(run_dir / FINISHED, dict)
    path = run_dir / "metrics.json"
    if finished and path.is_file() and sha256_of(path) != finished.get("sha256"):
        set_aside(path, "it is not what this run has written")


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


def _is_further(old: Any, new: Any) -> bool:
    """Whether a limit is higher than before; None and -1 are no limit."""
    if new == old or old in (None, -1):
        return False
    return new in (None, -1) or _number_of(new) > _number_of(old)


def _number_of(limit: Any) -> float:
    """A limit as a number: that of ``trainer.max_time`` is text such as 00:12:00:00."""
    if isinstance(limit, str):
        days, hours, minutes, seconds = map(int, limit.split(":"))
        return timedelta(days, seconds, hours=hours, minutes=minutes).total_seconds()
    return float(limit)
