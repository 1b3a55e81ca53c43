"""``run.json``: what a run records of itself, beside its configuration and metrics. No torch.

Rank zero writes it, whole, when the run starts, after each epoch, and when it ends. A process that
is killed cannot write any more: then the file still says ``running``, but nobody holds the lock of
the run directory.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from samestep.ranks.secrets import redact
from samestep.run import lock
from samestep.run.files import quarantine, read_text, write_text

log = logging.getLogger(__name__)

FILE = "run.json"
RUNNING, STOPPED, FAILED, FINISHED = "running", "stopped", "failed", "finished"
KILLED = "killed, or its machine was lost: it ended without a message"
MAX_WHY = 500  # characters of an error message


class Record(NamedTuple):
    """The fields of ``run.json``, in their order there. What is not known has its default."""

    run_id: str | None = None
    state: str = RUNNING  # running, stopped, failed or finished
    why: str = ""  # it stopped or failed
    time: str = ""  # when it was seen last, as ISO 8601 with the time zone
    epoch: int | None = None  # epochs that were trained to their end
    step: int | None = None  # optimizer steps
    monitor: str = ""  # the metric that chooses the best epoch; empty where none is known
    mode: str = ""  # of the monitor: max, if more is better, or min
    best: float | int | None = None  # its best value so far: that of best.ckpt
    best_epoch: int | None = None  # the epoch of this value, counted from 1
    shares: Sequence[float] | None = None  # of each batch, for each rank; None: all the same
    limits: Mapping[str, Any] = {}  # what may end it: once finished, it continues if one is higher
    notes: str = ""  # what it is about, for people
    tags: Sequence[str] = ()  # words that mark it in lists
    results: str | None = None  # SHA-256 of its metrics.json, as long as it is finished
    ends: Sequence[Mapping[str, Any]] = ()  # of its processes: time, state, why and step of each
    starts: Sequence[Mapping[str, Any]] = ()  # command, config, code and machine; the newest last

    @property
    def start(self) -> Mapping[str, Any]:
        """The newest start; empty if it is not known."""
        return self.starts[-1] if self.starts else {}

    @property
    def configs(self) -> tuple[str, ...]:
        """Digests of the configurations of its starts; a checkpoint carries one of them."""
        return tuple(str(start["config"]) for start in self.starts if "config" in start)

    @property
    def packages(self) -> dict[str, str]:
        """The versions of the packages that were installed at the newest start."""
        words = str(self.start.get("packages", "")).split()
        return dict(word.split("==", 1) for word in words if "==" in word)


LISTS = dict.fromkeys(("shares", "tags", "ends", "starts"), list)
KINDS = Record.__annotations__ | {"limits": dict, **LISTS}


def read(run_dir: Path) -> Record:
    """The record of a run; without the file, what its lock and its results tell.

    A field of a wrong kind counts as not known, so that a damaged file is no obstacle.
    """
    content = _read_file(run_dir) or {}
    known = {name: v for name, v in content.items() if name in KINDS and isinstance(v, KINDS[name])}
    for name in ("ends", "starts"):
        known[name] = [entry for entry in known.get(name, []) if isinstance(entry, dict)]
    if "state" not in known:
        known["state"] = FINISHED if (run_dir / "metrics.json").exists() else RUNNING
    record = Record(**known)
    if record.state == RUNNING and not lock.is_held(run_dir):
        return record._replace(state=STOPPED, why=KILLED)
    return record


def update(run_dir: Path, state: str, why: str = "", **facts: Any) -> None:
    """Write the state of a run and other fields of ``Record``; on rank zero only.

    Facts that are not given stay as they were. A file that cannot be read is set aside.

    Raises:
        OSError: if the file cannot be written.
    """
    content = _read_file(run_dir)
    if content is None and (run_dir / FILE).exists():
        quarantine(run_dir / FILE, "it holds no JSON object")
    time = datetime.now().astimezone().isoformat(timespec="seconds")
    why = redact(why).replace(f"{run_dir}/", "")[:MAX_WHY]
    new = {**(content or {}), **facts, "state": state, "why": why, "time": time}
    if state != RUNNING:
        end = {"time": time, "state": state, "why": why, "step": new.get("step")}
        new["ends"] = [*read(run_dir).ends, end]
    in_order = {name: new[name] for name in Record._fields if name in new}
    write_text(run_dir / FILE, json.dumps(in_order, indent=2) + "\n")


def try_to_update(run_dir: Path, state: str, why: str = "", **facts: Any) -> None:
    """Update the record, but only log that it cannot be written.

    When a disk is full, the checkpoint says so, or the error that has ended the run.
    """
    try:
        update(run_dir, state, why, **facts)
    except OSError as error:
        log.info("%s cannot be written: %s", run_dir / FILE, error.strerror)


def _read_file(run_dir: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(read_text(run_dir / FILE))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
