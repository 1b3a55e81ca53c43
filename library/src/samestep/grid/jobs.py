"""What is known of a grid: its jobs and how they have ended. Imports no torch.

runs/grids/<name>/
    jobs.json          all jobs that were ever asked for, and the values of each
    <run_id>.json      how a job has ended, and with which inputs
    logs/<run_id>.log  what it has printed; its processes hold the lock of this file
    slots/             which job is in which place of which machine
"""

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from samestep.ranks.secrets import redact
from samestep.run import record
from samestep.run.files import read_json, write_text

FOLDER = "grids"  # in the folder of all runs
JOBS = "jobs.json"


class Job(NamedTuple):
    """One run of a grid."""

    run_id: str
    run_dir: Path
    overrides: Sequence[str]
    values: Mapping[str, str]
    """Of the keys that have several values in the grid."""
    inputs: Callable[[], str]
    """Returns a digest of the configuration. Composing it takes time, which most jobs need not."""


class Outcome(NamedTuple):
    """How the newest start of a job has ended; the fields of ``<run_id>.json``."""

    inputs: str = ""
    exit_code: int | None = None  # None: it was started or submitted, and no driver saw its end
    why: str = ""
    time: str = ""  # as ISO 8601 with the time zone


def write_jobs(folder: Path, jobs: Iterable[Job]) -> None:
    """Add these jobs to those that the grid has already."""
    with alone(folder):
        known = read_jobs(folder)
        new = dict(known)
        for job in jobs:
            values = {key: redact(value) for key, value in job.values.items()}
            new[job.run_id] = values
        if new != known:
            write_text(folder / JOBS, json.dumps(new, indent=1) + "\n")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let no other driver write files of the grid during this block."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_jobs(folder: Path) -> dict[str, dict[str, str]]:
    """The jobs of a grid by their run ids, and the values of each; empty if it cannot be read."""
    found = {}
    for run_id, values in (read_json(folder / JOBS) or {}).items():
        # A damaged file must not block a grid, which writes it again.
        if isinstance(values, dict):
            found[run_id] = {str(key): str(value) for key, value in values.items()}
    return found


def write_outcome(folder: Path, job: Job, exit_code: int | None, why: str = "") -> None:
    """Write how a job has ended, or with None that it starts."""
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    outcome = Outcome(job.inputs(), exit_code, redact(why)[: record.MAX_WHY], now)
    with alone(folder):
        write_text(folder / f"{job.run_id}.json", json.dumps(outcome._asdict()) + "\n")


def read_outcome(folder: Path, run_id: str) -> Outcome:
    """How a job has ended; an empty one if it has not, or the file is damaged."""
    content = read_json(folder / f"{run_id}.json") or {}
    known: dict[str, Any] = {}
    for name, type_ in Outcome.__annotations__.items():
        if name in content and isinstance(content[name], type_):
            known[name] = content[name]
    return Outcome(**known)


def is_finished(folder: Path, job: Job, *, is_elsewhere: bool) -> bool:
    """Whether nothing is left to do for a job, as far as two small files tell.

    The run itself decides: a job of which this is not known is started, finds its run finished, and
    ends at once.

    Args:
        folder: of the grid.
        job: one of its jobs.
        is_elsewhere: whether the run directory cannot be seen from here.
    """
    outcome = read_outcome(folder, job.run_id)
    # With other values, in the files or typed, only the run itself knows whether they are allowed,
    # and whether they make it longer. Compared last: composing takes longer than reading.
    has_ended = _has_ended_well(outcome, job.run_dir, is_elsewhere=is_elsewhere)
    return has_ended and outcome.inputs == job.inputs()


def _has_ended_well(outcome: Outcome, run_dir: Path, *, is_elsewhere: bool) -> bool:
    if is_elsewhere and not (run_dir / record.FILE).exists():
        return outcome.exit_code == 0
    status = record.read(run_dir)
    if status.state != record.FINISHED or not status.time:
        return False
    if outcome.exit_code is not None:
        return outcome.exit_code == 0
    # A run that was finished before may have rejected this start.
    return record.timestamp(status.time) > record.timestamp(outcome.time)
