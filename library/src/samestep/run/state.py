"""How far a run is, in one small file: ``logs/state.json``. Imports no torch.

Rank zero writes it when the run starts, at the end of each epoch, when the run is told to stop,
when it fails, and when it is finished. A process that is killed cannot write any more: then the
file still says ``running``, but nobody holds the lock of the run directory.
"""

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from samestep.ranks.secrets import redact
from samestep.run import lock
from samestep.run.files import read_text, write_text

log = logging.getLogger(__name__)

STATE = "logs/state.json"
RUNNING, STOPPED, FAILED, FINISHED = "running", "stopped", "failed", "finished"
KILLED = "killed, or its machine was lost: it ended without a message"
MAX_WHY = 500  # characters of an error message


class Status(NamedTuple):
    """What is known of a run without reading its large files."""

    state: str  # running, stopped, failed or finished
    why: str = ""  # why it stopped or failed
    monitor: str = ""  # the metric that chooses the best epoch; empty where none is known
    best: float | int | None = None  # its best value so far: that of best.ckpt
    best_epoch: int | None = None  # the epoch of this value, counted from 1
    epoch: int | None = None  # epochs that were trained to their end
    step: int | None = None  # optimizer steps
    time: str = ""  # when the run was seen last, as ISO 8601 with the time zone


def record(run_dir: Path, state: str, why: str = "", **facts: Any) -> None:
    """Write the state of a run, on rank zero, and facts: other fields of ``Status``.

    Facts that are not given stay as they were. The ends of all starts are kept too, for the
    timeline. A state that cannot be written is only logged: the files of the run itself say it when
    a disk is full.
    """
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    old = _read_file(run_dir)
    why = redact(why).replace(f"{run_dir}/", "")[:MAX_WHY]
    new = {**old, **facts, "state": state, "why": why, "time": now}
    if state != RUNNING:
        end = {"time": now, "state": state, "why": why, "step": new.get("step")}
        new["ends"] = [*read_ends(run_dir), end]
    try:
        write_text(run_dir / STATE, json.dumps(new) + "\n")
    except OSError as error:
        log.info("%s cannot be written: %s", run_dir / STATE, error.strerror)


def read(run_dir: Path) -> Status:
    """The state of a run; without the file, what its lock and its results tell."""
    content = _read_file(run_dir)
    kinds = Status.__annotations__
    known = {k: v for k, v in content.items() if k in kinds and isinstance(v, kinds[k])}
    if "state" not in known:
        known["state"] = FINISHED if (run_dir / "metrics.json").exists() else RUNNING
    status = Status(**known)
    if status.state == RUNNING and not lock.is_held(run_dir):
        return status._replace(state=STOPPED, why=KILLED)
    return status


def tested_checkpoint(run_dir: Path) -> str:
    """The checkpoint that a run tests: ``best``, or ``last`` if no metric has ever chosen one."""
    best, last = (run_dir / f"checkpoints/{name}.ckpt" for name in ("best", "last"))
    # A best checkpoint that is lost is not replaced by other weights.
    has_none = last.exists() and not best.exists() and read(run_dir).best is None
    return "last" if has_none else "best"


def read_ends(run_dir: Path) -> list[dict[str, Any]]:
    """Each end of a process of this run that could say so: its time, state, reason and step."""
    ends = _read_file(run_dir).get("ends")
    return [end for end in ends if isinstance(end, dict)] if isinstance(ends, list) else []


def _read_file(run_dir: Path) -> dict[str, Any]:
    """What the file holds; nothing if it is absent or damaged."""
    try:
        content = json.loads(read_text(run_dir / STATE))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
