"""Where the wall time of a run goes: seconds by cause, in every process of it. Imports no torch.

A process does one thing at a time, so its causes share out all of its time: from its start, before
it has imported anything, to the end of the run. Waiting for a GPU counts where the process waits.

Rank zero keeps seconds and steps in ``time.bin``, in numbers of fixed places: the step before each
step, the seconds from a thread ten times a second. So a process that is killed loses no step and a
tenth of a second. ``run.json`` has them for each start, and gets those of the newest start from
this file. Nothing depends on it: one that cannot be written ends no run.
"""

import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from samestep.ranks import environment, process_table

log = logging.getLogger(__name__)

FILE = "time.bin"
IMPORT, START, SEARCH, COMPILE = "import", "start", "search", "compile"
TRAINING, DATA, REPEATED = "training", "data", "repeated"
VALIDATION, SAVING, STOPPING, AWAY = "validation", "saving", "stopping", "away"
CAUSES = (
    IMPORT, START, SEARCH, COMPILE, TRAINING, DATA, VALIDATION, SAVING, REPEATED, STOPPING,
)  # fmt: skip
"""What a process does. Between two processes a run is ``AWAY``."""

EVERY_S = 0.1  # seconds between two writes of the thread
FRACTION = 0.005  # of the time of this process, for which training may wait for these writes
BURST_S = 0.05  # and more, so that one slow write leaves out no step
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


class Clock:
    """Counts the seconds of this process by cause.

    Args:
        began: the time, since 1970, from which it counts.
        cause: of the time since then.
    """

    def __init__(self, began: float, cause: str) -> None:
        self.began = began
        self.step = self.first_step = 0
        self.away = 0.0
        self.device = "cpu"
        self.run_dir: Path | None = None
        """The run whose time this is, on rank zero from the moment at which it is opened."""
        self.waited_s = 0.0
        """Seconds of waiting for batches, also of steps that are repeated."""
        self.has_ended = False
        self._repeats_until = 0
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = cause
        # Within a process its own clock counts: that of the machine may be set meanwhile.
        self._since = self._origin = time.perf_counter() - (time.time() - began)
        self._file = -1  # closed
        self._write_s = 0.0  # in which training has waited for writes
        self._ends = threading.Event()

    def switch(self, cause: str) -> str:
        """Count what comes under this cause; returns the cause of before."""
        now = time.perf_counter()
        before = self._cause
        self._seconds[before] += now - self._since
        self._since = now
        self._cause = cause
        return before

    def count_step(self, step: int) -> None:
        """Note how many optimizer steps the run has taken."""
        self.step = step
        now = time.perf_counter()
        may_write = self._write_s <= BURST_S + FRACTION * (now - self._origin)
        if self._file >= 0 and may_write:
            self._write_step()
            self._write_s += time.perf_counter() - now

    def wait_for_batch(self) -> str:
        """Wait for the data of a step from now on; returns the cause that follows."""
        # Whatever steps wait for that are repeated, they are the price of the interruption.
        is_repeated = self.step < self._repeats_until
        self.switch(REPEATED if is_repeated else DATA)
        self.waited_s -= self._since
        return REPEATED if is_repeated else TRAINING

    def take_batch(self, cause: str) -> None:
        """Count what follows the wait under the cause that ``wait_for_batch`` has returned."""
        self.switch(cause)
        self.waited_s += self._since

    def seconds(self) -> dict[str, float]:
        """The seconds by cause until now; any thread may call this."""
        found = dict(self._seconds)
        # Not from ``_since``: the thread of the training may be in the middle of ``switch``.
        total = time.perf_counter() - self._origin
        found[self._cause] += total - sum(found.values())
        return found

    def as_start(self) -> Start:
        """What is known now."""
        return Start(
            began=self.began,
            away=self.away,
            first_step=self.first_step,
            step=self.step,
            device=self.device,
            num_ranks=environment.world_size(),
            seconds=self.seconds(),
        )

    def open(
        self, run_dir: Path, earlier: Sequence[Start], first_step: int, *, goes_on: bool
    ) -> None:
        """Keep the time of a run from now on; on rank zero only.

        Args:
            run_dir: directory of the run, which this process owns.
            earlier: what the processes before have spent.
            first_step: where the run resumes.
            goes_on: whether the run has not been finished since.
        """
        self.run_dir = run_dir
        self.step = self.first_step = first_step
        last_end = earlier[-1].ended if earlier else 0.0
        self._include_agent(last_end)
        if earlier and goes_on:
            self.away = max(0.0, self.began - last_end)
        self._repeats_until = max((start.step for start in earlier), default=0)
        path = run_dir / FILE
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            log.info("%s cannot be written: %s", path, error.strerror)
            return
        write(self._file, BEGAN.pack(self.began) + STEP.pack(self.step) + self._pack_seconds(), 0)
        threading.Thread(target=self._write_often, args=(self._file,), daemon=True).start()

    def close(self) -> None:
        """Count no further; without it, a clock counts until the process ends."""
        self.has_ended = True
        if self._file < 0:
            return
        self._write_step()
        write(self._file, self._pack_seconds(), BEGAN.size + STEP.size)
        # The thread closes it: were it in the middle of a write, the number might be that of
        # another file by then.
        self._file = -1
        self._ends.set()

    def _include_agent(self, last_end: float) -> None:
        """Count from the start of this rank's agent, if this is the first rank that it starts."""
        if not environment.under_torchrun():
            return
        agent = process_table.time_of_start(environment.parent())
        # One that has restarted its ranks is older than the process before.
        if agent is not None and last_end < agent < self.began:
            self._seconds[START] += self.began - agent
            self._origin -= self.began - agent
            self.began = agent

    def _pack_seconds(self) -> bytes:
        return SECONDS.pack(*self.seconds().values())

    def _write_step(self) -> None:
        write(self._file, STEP.pack(self.step), BEGAN.size)

    def _write_often(self, file: int) -> None:
        pause_s = EVERY_S
        while not self._ends.wait(pause_s):
            start = time.perf_counter()
            write(file, self._pack_seconds(), BEGAN.size + STEP.size)
            # Nothing waits for this thread, so a write may take a tenth of its time.
            pause_s = max(EVERY_S, 10 * (time.perf_counter() - start))
        os.close(file)


def write(file: int, content: bytes, place: int) -> None:
    """Write into a file. The kernel has it then, and keeps it if this process is killed."""
    # Not into memory that is mapped to the file: on a full disk that can end the process.
    try:
        os.pwrite(file, content, place)
    except OSError as error:
        # Not a warning: on a full disk the next checkpoint fails, with a better message.
        log.info("%s cannot be written: %s", FILE, error.strerror)


_clock: Clock | None = None


def current() -> Clock:
    """The clock of this process; a new one if there is none, or its run has ended."""
    global _clock
    if _clock is None:
        _clock = Clock(time_of_start(), IMPORT)
    elif _clock.has_ended:
        _clock = Clock(time.time(), START)
    return _clock


def begin() -> None:
    """Count what comes as the start of a run; one that this process has trained has ended."""
    if _clock is not None and _clock.run_dir is not None:
        _clock.close()
    current().switch(START)


def end() -> None:
    """Count what comes as stopping.

    The process has its devices until it ends, and a script may test the run. But a notebook may be
    open for days, and so may one in which a run was rejected.
    """
    clock = current()
    clock.switch(STOPPING)
    if is_interactive():
        clock.close()


@contextmanager
def spend(cause: str) -> Iterator[None]:
    """Count this block, or function, under a cause."""
    clock = current()
    before = clock.switch(cause)
    try:
        yield
    finally:
        clock.switch(before)


_before_compile: list[str] = []


def begin_compile(*_: Any) -> None:
    """Count what comes as compiling; ``torch.compile`` calls this."""
    _before_compile.append(current().switch(COMPILE))


def end_compile(*_: Any) -> None:
    """Count what comes as what it was before."""
    if _before_compile:
        current().switch(_before_compile.pop())


def is_interactive() -> bool:
    """Whether a person types into this process, as in a notebook."""
    return hasattr(sys, "ps1")


def time_of_start() -> float:
    """From when the time of this process counts for its first run."""
    # A notebook was perhaps opened days ago.
    if is_interactive():
        return time.time()
    started = process_table.time_of_start(os.getpid())
    return time.time() if started is None else started


# -- What the processes of a run have left ---------------------------------------------------------


def entry_of(run_dir: Path) -> dict[str, Any] | None:
    """What ``run.json`` keeps of this process; None unless it keeps the time of this run."""
    if _clock is None or _clock.run_dir != run_dir or _clock.has_ended:
        return None
    return to_entry(_clock.as_start())


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
        content = (run_dir / FILE).read_bytes()
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
