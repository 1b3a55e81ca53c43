"""One run, one directory: beginning it, continuing it, finishing it, reading it back.

Its files are listed in ``layout``.
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
from samestep.ranks.secrets import redact, redact_argument, redact_values
from samestep.run import lock, manifest, provenance, record
from samestep.run.changes import config_digest, find_changes
from samestep.run.files import open_atomic, quarantine, read_bytes, sha256_of, write_text, writing
from samestep.run.layout import BEST, LAST, RECORDS
from samestep.run.metrics import read_final_metrics, why_damaged
from samestep.run_spec import RunSpec

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Start(NamedTuple):
    """How a process starts: with nothing left to train, from a checkpoint, or from step 0."""

    finished: bool
    ckpt_path: str | None  # to continue from; None where the run begins


class Before(NamedTuple):
    """What a start must leave behind if it never saves a checkpoint."""

    made: list[Path]  # folders that are new: the run directory, and those above it
    records: dict[Path, bytes | None]  # of an older run
    last: manifest.Manifest | None  # of its last checkpoint


_before: dict[Path, Before] = {}  # by run directory


def begin(spec: RunSpec, argv: list[str], copies: str | None = None) -> Start:
    """Open the run directory, new or old, of the command line ``argv``; on rank zero only.

    The results of a finished run stay until the run that continues has new ones. ``copies`` is the
    address of the store that has copies of the runs, if there is one.
    """
    run_dir = spec.run_dir
    if is_finished(spec) and not find_changes(spec):
        return Start(finished=True, ckpt_path=None)  # which may be where nobody can write
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        lock.acquire(run_dir)
        if [path.name for path in run_dir.iterdir()] != [lock.FILE]:
            made = []  # another process has begun the same run meanwhile, and has left it again
        _remember(run_dir, made)
        if copies:
            from samestep.run import store  # fsspec, which few runs need

            store.fetch(copies, run_dir)
            _remember(run_dir, made)
        # What was true before the lock, another process may have changed.
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
            f"run_dir={run_dir} cannot be written: {error.strerror}; free some space or get "
            "permission there, or choose another directory with run_root=..."
        ) from error
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    print(f"{'Continuing' if last else 'Run'}: {run_dir}", *lines, sep="\n", flush=True)
    return Start(finished=False, ckpt_path=str(last) if last else None)


def _remember(run_dir: Path, made: list[Path]) -> None:
    """Keep for ``abandon`` what is in the directory, which this process owns."""
    records = {run_dir / name: read_bytes(run_dir / name) for name in RECORDS}
    _before[run_dir.absolute()] = Before(made, records, manifest.read(run_dir / LAST))


def abandon(run_dir: Path) -> None:
    """Undo what ``begin`` has written for a run that cannot be run; on rank zero only.

    A run directory that ``begin`` has made is removed. An older one gets its records back. If a
    checkpoint was saved since, everything stays.
    """
    before = _before.pop(run_dir.absolute(), None)
    if before is None or manifest.read(run_dir / LAST) != before.last:
        return
    if not before.made:
        for path, content in before.records.items():
            # On a full disk nothing was replaced, and nothing can be.
            if content is not None and content != read_bytes(path):
                with open_atomic(path) as file:
                    file.write(content)
        return
    # Under its own name it would be emptied while another process begins in there.
    removed = run_dir.with_name(f".{run_dir.name}.removed-{os.getpid()}")
    with suppress(OSError):
        run_dir.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    lock.forget(run_dir)
    with suppress(OSError):  # another run has begun in there
        for folder in before.made[1:]:
            folder.rmdir()


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
    newest = _newest_manifest(run_dir)
    # A best checkpoint that is lost is not replaced by other weights.
    return "last" if newest and newest.best_step is None else "best"


def best_checkpoint(run_dir: Path) -> str | None:
    """The best checkpoint; None where no metric has chosen one: the last one is tested then."""
    from samestep.run.checkpoint import unusable

    path, newest = run_dir / BEST, _newest_manifest(run_dir)
    if newest is None or newest.best_step is None:
        return None
    best, step = manifest.read(path), newest.best_step
    if best and best.global_step == step:
        return str(path)
    why = f"it is from step {best.global_step}" if best else "it is missing, or damaged"
    raise unusable(path, f"{why}, and the best checkpoint is from step {step}")


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
        log.warning("%s: not a number, and null in metrics.json; check the data for nan", odd)


def _newest_manifest(run_dir: Path) -> manifest.Manifest | None:
    """The manifest of the newest checkpoint, which says which one is the best."""
    manifests = map(manifest.read, (run_dir / "checkpoints").glob("[!.]*.ckpt"))
    return max(filter(None, manifests), key=lambda found: found.age, default=None)


def _open(spec: RunSpec, argv: list[str]) -> Path | None:
    """Check what is in the directory, and record this start: the newest checkpoint."""
    from samestep.run.checkpoint import find_valid  # torch, which looking at runs does not need

    run_dir = spec.run_dir
    known = record.read(run_dir)
    # A history that cannot be read is in the checkpoint too. It is written again from there.
    if why := why_damaged(run_dir):
        quarantine(run_dir / "metrics.csv", why)
    path = run_dir / "metrics.json"
    if path.exists() and read_final_metrics(run_dir) is None:
        quarantine(path, "it holds no JSON object")
    elif known.results and path.is_file() and sha256_of(path) != known.results:
        quarantine(path, "it was not written by this run")
    found = find_valid(run_dir / "checkpoints", known._replace(run_id=spec.run_id))
    last = found[0] if found else None
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
        **(machine := provenance.machine_info()),
        # One text: a list of hundreds of lines would be slow to read, for people too.
        "packages": " ".join(f"{name}=={v}" for name, v in machine["packages"].items()),
    }
    starts = [dict(start) for start in known.starts]
    if starts and starts[-1].get("packages") == start["packages"]:
        del starts[-1]["packages"]  # the newest start has the same
    progress = ("epoch", "step", "monitor", "mode", "best", "best_epoch", "shares")
    # Without a checkpoint the run starts over.
    forgotten: dict[str, Any] = {} if last else dict.fromkeys(progress)
    record.update(
        run_dir,
        record.RUNNING,
        run_id=spec.run_id,
        limits={name: _number_of(limit) for name, limit in spec.limits.items()},
        results=None,  # those of before stay in metrics.json
        notes=redact(spec.notes) or known.notes,
        tags=list(map(redact, spec.tags)) or known.tags,
        starts=[*starts, redact_values(start)],
        **forgotten,
    )
    return last


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
