"""The record of a run, ``run.json``: its state, starts and ends. Imports no torch.

Rank zero rewrites it when the run starts, after each epoch, and when it ends. A killed process
cannot write: then the file still says ``running``, but no process holds the lock of the run
directory.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from samestep.ranks.secrets import redact
from samestep.run import lock
from samestep.run.files import quarantine, read_json, write_text

log = logging.getLogger(__name__)

FILE = "run.json"
RUNNING, STOPPED, FAILED, FINISHED = "running", "stopped", "failed", "finished"
PRUNED = "pruned"
KILLED = "killed, or its machine was lost: it ended without a message"
MAX_WHY = 500  # characters of an error message


class Record(NamedTuple):
    """The fields of ``run.json``, in their order there. Unknown ones have their default."""

    run_id: str | None = None
    state: str = RUNNING  # running, stopped, failed or finished
    why: str = ""  # the reason for stopped or failed
    time: str = ""  # of the last update, as ISO 8601 with the time zone
    epoch: int | None = None  # completed epochs
    step: int | None = None  # optimizer steps
    monitor: str = ""  # the metric that chooses the best epoch; empty if unknown
    mode: str = ""  # of the monitor: max or min
    best: float | int | None = None  # best value of the monitor so far, that of best.ckpt
    best_epoch: int | None = None  # the epoch of this value, counted from 1
    save_every_s: float | None = None  # seconds between two saves, if the run chooses them
    save_price_s: float | None = None  # seconds that training waits for a save
    shares: Sequence[float] | None = None  # fraction of each batch for each rank; None: equal
    limits: Mapping[str, Any] = {}  # max_epochs and so on: raising one resumes a finished run
    notes: str = ""  # free text
    tags: Sequence[str] = ()  # to filter lists of runs
    trackers: Mapping[str, Any] = {}  # versions, or ids, of Lightning's loggers
    evaluated: Sequence[str] = ()  # what the trackers have of a finished run, such as test
    results: str | None = None  # SHA-256 of metrics.json, while the run is finished
    # what repeated batches were compared with: step, batches, result, note; newest last
    repeats: Sequence[Mapping[str, Any]] = ()
    # ranks for which the others wait: rank, cause, step_s, others_s, step; each once in a start
    slow_ranks: Sequence[Mapping[str, Any]] = ()
    ends: Sequence[Mapping[str, Any]] = ()  # time, state, why and step of each end
    # command, config, code and machine, and where its time went; newest last
    starts: Sequence[Mapping[str, Any]] = ()

    @property
    def start(self) -> Mapping[str, Any]:
        """The newest start; empty if there is none."""
        return self.starts[-1] if self.starts else {}

    @property
    def configs(self) -> tuple[str, ...]:
        """Digests of the configurations of all starts; each checkpoint contains one of them."""
        return tuple(str(start["config"]) for start in self.starts if "config" in start)


LISTS = dict.fromkeys(
    ("shares", "tags", "evaluated", "repeats", "slow_ranks", "ends", "starts"), list
)
# The annotations say Sequence and Mapping; JSON has lists and objects.
TYPES = Record.__annotations__ | {"limits": dict, "trackers": dict, **LISTS}

facts_of_start: list[Callable[[Path], Mapping[str, Any]]] = []
"""Each gives what every update adds to the newest start of this run; plug-ins add theirs."""


def read(run_dir: Path) -> Record:
    """The record of a run. Without the file, its state follows from its lock and its results."""
    content = read_json(run_dir / FILE) or {}
    known: dict[str, Any] = {}
    for name, type_ in TYPES.items():
        value = content.get(name)
        # A field of another type counts as unknown: a damaged file must not block the run.
        if isinstance(value, type_):
            known[name] = value
    for name in ("repeats", "slow_ranks", "ends", "starts"):
        known[name] = [entry for entry in known.get(name, []) if isinstance(entry, dict)]
    if "state" not in known:
        known["state"] = FINISHED if (run_dir / "metrics.json").exists() else RUNNING
    record = Record(**known)
    # Only the kernel knows about a process that was killed: it has released the lock.
    if record.state == RUNNING and not lock.is_held(run_dir):
        return record._replace(state=STOPPED, why=KILLED)
    return record


def update(run_dir: Path, state: str, why: str = "", **facts: Any) -> None:
    """Write the state of a run and other fields of ``Record``; on rank zero only.

    Other fields keep their values. A file that cannot be read is kept as ``run.json.damaged``.

    Raises:
        OSError: if the file cannot be written.
    """
    content = read_json(run_dir / FILE)
    if content is None and (run_dir / FILE).exists():
        quarantine(run_dir / FILE, "it holds no JSON object")
    time = datetime.now().astimezone().isoformat(timespec="seconds")
    why = redact(why).replace(f"{run_dir}/", "")[:MAX_WHY]
    new = {**(content or {}), **facts, "state": state, "why": why, "time": time}
    if state != RUNNING:
        end = {"time": time, "state": state, "why": why, "step": new.get("step")}
        new["ends"] = [*read(run_dir).ends, end]
    for find_facts in facts_of_start:
        found = find_facts(run_dir)
        if found:
            *before, newest = new["starts"]
            new["starts"] = [*before, {**newest, **found}]
    _write(run_dir, new)


def add(run_dir: Path, **facts: Any) -> None:
    """Write fields of ``Record`` that say nothing about the state; on rank zero only.

    Raises:
        OSError: if the file cannot be written.
    """
    _write(run_dir, {**(read_json(run_dir / FILE) or {}), **facts})


def _write(run_dir: Path, content: Mapping[str, Any]) -> None:
    # A field of a newer version, which this one does not know, is dropped here.
    in_order = {name: content[name] for name in Record._fields if name in content}
    write_text(run_dir / FILE, json.dumps(in_order, indent=2) + "\n")


def try_to_update(run_dir: Path, state: str, why: str = "", **facts: Any) -> None:
    """Update the record; log an error instead of raising it."""
    try:
        update(run_dir, state, why, **facts)
    except OSError as error:
        # Not a warning: on a full disk the next checkpoint fails, with a better message.
        log.info("%s cannot be written: %s", run_dir / FILE, error.strerror)


def timestamp(text: Any) -> float:
    """Seconds since 1970 of a time in ISO 8601; 0 if ``text`` is not such a time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0
