"""``time.bin`` and ``run.json``: what each process of a run has spent. Imports no torch.

``time.bin`` has seconds and steps of the newest start in numbers of fixed places, and ``run.json``
those of all starts. Nothing depends on the file: one that cannot be written ends no run.
"""

import logging
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.run.layout import TIME
from samestep.run.phases import (
    DATA,
    IMPORT,
    SAVING,
    SEARCH,
    START,
    STOPPING,
    TRAINING,
    VALIDATION,
)

log = logging.getLogger(__name__)

COMPILE, REPEATED = "compile", "repeated"
CAUSES = (
    IMPORT, START, SEARCH, COMPILE, TRAINING, DATA, VALIDATION, SAVING, REPEATED, STOPPING,
)  # fmt: skip
"""What a process spends its time on. Between two processes a run is away."""

BEGAN = struct.Struct("<d")
STEP = struct.Struct("<q")
SECONDS = struct.Struct(f"<{len(CAUSES)}d")
SIZE = BEGAN.size + STEP.size + SECONDS.size


class Start(NamedTuple):
    """What one process of a run has spent, as ``run.json`` keeps it."""

    began: float
    """Seconds since 1970."""
    away: float
    """Seconds since the process before; 0 for the first one, and after the run had finished."""
    first_step: int
    """Where it resumed."""
    step: int
    """Optimizer steps of the run when it ended, or now."""
    device: str
    """Of each rank: cuda, mps or cpu."""
    num_ranks: int
    seconds: Mapping[str, float]
    """By cause, until it ended, or now."""

    @property
    def ended(self) -> float:
        """When it was last alive, in seconds since 1970."""
        return self.began + sum(self.seconds.values())


def write(file: int, content: bytes, place: int) -> None:
    """Write into a file. The kernel has it then, and keeps it if this process is killed."""
    # Not into memory that is mapped to the file: on a full disk that can end the process.
    try:
        os.pwrite(file, content, place)
    except OSError as error:
        # Not a warning: on a full disk the next checkpoint fails, with a better message.
        log.info("%s cannot be written: %s", TIME, error.strerror)


def to_entry(start: Start) -> dict[str, Any]:
    """A start for ``run.json``, with milliseconds."""
    seconds = {cause: round(spent, 3) for cause, spent in start.seconds.items()}
    return start._asdict() | {"away": round(start.away, 3), "seconds": seconds}


def read_starts(run_dir: Path, entries: Sequence[Mapping[str, Any]]) -> list[Start]:
    """What each start of a run has spent.

    Args:
        run_dir: of the run.
        entries: the starts in ``run.json``; those without this entry are left out.
    """
    starts = []
    for entry in entries:
        try:
            starts.append(Start(**entry["spent"]))
        except (KeyError, TypeError):
            log.info("%s: a start has no account of its time", run_dir)
    try:
        content = (run_dir / TIME).read_bytes()
    except OSError:
        return starts
    if len(content) != SIZE or not starts:
        return starts
    (began,) = BEGAN.unpack_from(content)
    # A copy of the run may have an older file, or none.
    if began == starts[-1].began:
        (step,) = STEP.unpack_from(content, BEGAN.size)
        spent = SECONDS.unpack_from(content, BEGAN.size + STEP.size)
        seconds = dict(zip(CAUSES, spent, strict=True))
        starts[-1] = starts[-1]._replace(step=step, seconds=seconds)
    return starts


def count_repeated_steps(starts: Sequence[Start]) -> int:
    """How many steps were taken that an earlier process had taken before it was interrupted."""
    furthest = repeated = 0
    for start in starts:
        repeated += max(0, min(start.step, furthest) - start.first_step)
        furthest = max(furthest, start.step)
    return repeated
