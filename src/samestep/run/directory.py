"""One run, one directory: beginning it, continuing it, finishing it, reading it back.

runs/<run_id>/
    config.yaml        the whole configuration, resolved, without secrets
    metrics.json       the final metrics
    metrics.csv        the metrics over time
    checkpoints/       best.ckpt to test, last.ckpt to continue from, epoch-0002.ckpt and so on
                       to keep, a .sha256 file for each
    predictions/       pictures of test results
    logs/              environment.json, state.json, finished.json, git.diff, shares.json,
                       rank-<n>.log
    report.html        all of this to look at
"""

import errno
import json
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from samestep.config.compose import find_overridden
from samestep.errors import ConfigError
from samestep.run import lock, state
from samestep.run.changes import config_digest, find_changes, resolved
from samestep.run.files import put_back, read_bytes, set_aside, sha256_of, write_text
from samestep.run.identity import Identity, read_identity
from samestep.run.records import read_history, read_json, record_attempt, why_damaged
from samestep.run.summary import find_best, summarize

log = logging.getLogger(__name__)

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
FINISHED = "logs/finished.json"  # of which run metrics.json is, and how long that was
SHARES = "logs/shares.json"  # how fast the ranks were, with cluster.shares=auto

SIDECAR = "checkpoints/last.ckpt.sha256"  # it changes with each checkpoint
RECORDS = (
    "config.yaml", "metrics.csv", "logs/environment.json", "logs/git.diff", SHARES, FINISHED,
    state.STATE, SIDECAR,
)  # fmt: skip
LAST_CHECKPOINT = "samestep.callbacks.last_checkpoint.LastCheckpoint"
NO_CHECKPOINT = (
    "Note: this run keeps no checkpoint, because no callback is a LastCheckpoint. If it is "
    "interrupted, it begins anew. A file of configs/callbacks gets one by `defaults: - default`."
)


class Start(NamedTuple):
    """How a process starts: with nothing left to train, from a checkpoint, or anew."""

    finished: bool
    ckpt_path: str | None  # to continue from; None where the run begins


class Before(NamedTuple):
    """What was there before ``begin`` opened a run directory."""

    missing: list[Path]  # the run directory, and the folders above it, if they were not there
    files: dict[Path, bytes | None]  # the records; None: there was no such file


_before: dict[Path, Before] = {}  # by run directory, as begin found it


def begin(cfg: DictConfig, argv: list[str]) -> Start:
    """Open the run directory, new or old, of the command line ``argv``; on rank zero only.

    The results of a finished run stay until the run that continues has new ones.

    Raises:
        ConfigError: if the directory holds another run, or cannot be written.
        CheckpointError: if it holds checkpoints, and none of them can be used.
    """
    run_dir = Path(cfg.run_dir)
    find_changes(cfg)  # a run that is refused, or finished, is not even locked
    if is_finished(cfg):
        return _say_finished(run_dir)
    try:
        _lock_directory(run_dir)
        _fetch_copy(cfg, run_dir)
        # Another process may have begun or finished the run before this one could lock it.
        changed = find_changes(cfg)
        if is_finished(cfg):
            return _say_finished(run_dir)
        last = _open(cfg, argv)
    except ConfigError:
        abandon(cfg)
        raise
    except OSError as error:
        abandon(cfg)
        raise ConfigError(
            f"run_dir={run_dir} cannot be written: {error.strerror}; make room or get permission "
            "there, or choose another directory with run_root=..."
        ) from error
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changed.items()]
    print(f"{'Continuing' if last else 'Run'}: {run_dir}", *lines, sep="\n", flush=True)
    targets = [str(node.get("_target_")) for node in (cfg.callbacks or {}).values()]
    if LAST_CHECKPOINT not in targets and not cfg.trainer.fast_dev_run:
        print(NO_CHECKPOINT, flush=True)
    return Start(finished=False, ckpt_path=str(last) if last else None)


@contextmanager
def full_disk_is_one_message(run_dir: str) -> Iterator[None]:
    """Turn the errors of a full disk within this block into one message."""
    from samestep.run.checkpoint import cannot_write

    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise cannot_write(Path(error.filename or run_dir), error) from error


def abandon(cfg: DictConfig) -> None:
    """Undo what ``begin`` has written for a run that cannot be run; on rank zero only.

    A run directory that ``begin`` has made is removed. In an older one the records become those of
    before. If a checkpoint was saved since, everything stays.
    """
    run_dir = Path(cfg.run_dir)
    before = _before.pop(run_dir.absolute(), None)
    if before is None:
        return
    has_saved = read_bytes(run_dir / SIDECAR) != before.files[run_dir / SIDECAR]
    if has_saved:
        return
    if not before.missing:
        for path, content in before.files.items():
            put_back(path, content)
        return
    shutil.rmtree(run_dir, ignore_errors=True)
    lock.forget(run_dir)
    for folder in before.missing[1:]:
        try:
            folder.rmdir()
        except OSError:
            return  # another run has begun in there


def is_finished(cfg: DictConfig) -> bool:
    """Whether the run has its results, and ``cfg`` does not ask to train it longer."""
    run_dir = Path(cfg.run_dir)
    finished = read_json(run_dir / FINISHED, dict) or {}
    path = run_dir / "metrics.json"
    if finished.get("run_id") != cfg.run_id or not path.is_file():
        return False
    if sha256_of(path) != finished.get("sha256"):
        return False
    old_limits = finished.get("limits", {})
    return not any(_is_further(old_limits.get(k), new) for k, new in _limits(cfg).items())


def best_checkpoint(cfg: DictConfig) -> str | None:
    """The checkpoint to test; None where none was the best one, as in ``debug=fast``.

    Raises:
        CheckpointError: if the best checkpoint has disappeared.
    """
    from samestep.run.checkpoint import CheckpointError, load

    folder = Path(cfg.run_dir) / "checkpoints"
    path = folder / "best.ckpt"
    if path.exists():
        return str(path)
    if not (folder / "last.ckpt").exists():
        return None  # nothing was saved
    best = load(folder / "last.ckpt").get("callbacks", {}).get("BestCheckpoint", {})
    if best.get("step") is None:
        return None
    raise CheckpointError(
        f"{path} is missing: it was saved after step {best['step']}, with "
        f"{best['monitor']}={best['score']:.4f}. Restore it together with its .sha256 file: the "
        "same command then tests it. Or train further with a larger trainer.max_epochs: the best "
        "checkpoint from there on takes its place.",
        on_all_ranks=True,
    )


def finish(cfg: DictConfig, metrics: dict[str, float], *, seconds: float) -> dict[str, float]:
    """Write ``metrics.json``, which ends the run, and say so; on rank zero only.

    Values that are not numbers are null in the file, and warned about.
    """
    run_dir = Path(cfg.run_dir)
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    text = json.dumps(finite, indent=2, sort_keys=True) + "\n"
    write_text(run_dir / "metrics.json", text)
    finished = {
        "run_id": cfg.run_id,
        "sha256": sha256_of(run_dir / "metrics.json"),
        "limits": _limits(cfg),
    }
    write_text(run_dir / FINISHED, json.dumps(finished) + "\n")
    state.record(run_dir, state.FINISHED, **find_best(cfg, read_history(run_dir)))
    if odd := ", ".join(sorted(name for name in finite if finite[name] is None)):
        log.warning("%s: not a number, and null in metrics.json; look for nan in the data", odd)
    print(summarize(run_dir, seconds), flush=True)
    return metrics


def _lock_directory(run_dir: Path) -> None:
    """Own the directory, and remember what was there before."""
    missing = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    lock.acquire(run_dir)
    # Another process may have begun the same run meanwhile, and left it again: then it is not new.
    is_new = missing and [path.name for path in run_dir.iterdir()] == [lock.FILE]
    files = {run_dir / name: read_bytes(run_dir / name) for name in RECORDS}
    _before[run_dir.absolute()] = Before(missing if is_new else [], files)


def _open(cfg: DictConfig, argv: list[str]) -> Path | None:
    """Check what is in the directory, and record this start: the newest checkpoint."""
    from samestep.run.checkpoint import find_newest  # torch, which looking at runs does not need

    run_dir = Path(cfg.run_dir)
    set_damaged_aside(run_dir)
    known = read_identity(run_dir)
    last = find_newest(run_dir / "checkpoints", Identity(cfg.run_id, known.configs))
    for name in ("checkpoints", "logs"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    # The run has no new results yet. Those of before stay in metrics.json.
    (run_dir / FINISHED).unlink(missing_ok=True)
    if last is None:
        (run_dir / "metrics.csv").unlink(missing_ok=True)
    write_text(run_dir / "config.yaml", OmegaConf.to_yaml(resolved(cfg)))
    identity = {"run_id": cfg.run_id, "config": config_digest(cfg)}
    overridden = find_overridden(OmegaConf.select(cfg, "choices") or {}, argv[1:])
    record_attempt(run_dir / "logs", argv, cfg.seed, {**identity, "overridden": overridden})
    begins_anew: dict[str, Any] = {"monitor": "", "best": None, "epoch": None, "step": None}
    state.record(run_dir, state.RUNNING, **({} if last else begins_anew))
    return last


def _say_finished(run_dir: Path) -> Start:
    print("Nothing to do, the run is finished. RUN_ID=<another name> begins a new one.")
    print(summarize(run_dir), flush=True)
    return Start(finished=True, ckpt_path=None)


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


def _fetch_copy(cfg: DictConfig, run_dir: Path) -> None:
    """Continue from the copy in a store, if no checkpoint is here or the copy has a newer one."""
    from samestep.run import store

    url = OmegaConf.select(cfg, "callbacks.artifacts.url")
    if not url:
        return
    if list(run_dir.glob("checkpoints/*.ckpt")):
        store.fetch_newer(url, run_dir)
        return
    store.fetch(url, run_dir)
    before = _before[run_dir.absolute()]
    if before.missing:
        # What was fetched is still in the store, so `abandon` removes it with the directory.
        before.files[run_dir / SIDECAR] = read_bytes(run_dir / SIDECAR)


def _limits(cfg: DictConfig) -> dict[str, Any]:
    """How long the run may be: every ``trainer.max_*``."""
    return {str(key): cfg.trainer[key] for key in cfg.trainer if str(key).startswith("max_")}


def _is_further(old: Any, new: Any) -> bool:
    """Whether a limit is higher than before; None and -1 are no limit."""
    if new == old or old in (None, -1):
        return False
    return new in (None, -1) or new > old
