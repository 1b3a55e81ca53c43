"""Where the wall time of a run goes: seconds by cause, in every process of it.

A process does one thing at a time, so its causes share out all of its time: from its start, before
it has imported anything, to the end of the run. Waiting for a GPU counts where the process waits.

Rank zero keeps seconds and steps in ``time.bin`` (see ``time_file``): the step with each step, the
seconds from a thread ten times a second. So a process that is killed loses no step and a tenth of a
second. ``run.json`` has them for each start, and gets those of the newest start from this file.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from samestep.plugins.time_file import (
    BEGAN,
    CAUSES,
    COMPILE,
    REPEATED,
    SECONDS,
    STEP,
    Start,
    read_starts,
    to_entry,
    write,
)
from samestep.ranks import environment, process_table
from samestep.ranks.process_group import device_kind
from samestep.run import phases, record
from samestep.run.layout import TIME
from samestep.run.phases import AWAY, DATA, IMPORT, OUTSIDE, START, STOPPING, TRAINING
from samestep.run_spec import RunSpec

log = logging.getLogger(__name__)

EVERY_S = 0.1  # seconds between two writes of the thread
FRACTION = 0.005  # of the time of this process, for which training may wait for these writes
BURST_S = 0.05  # and more, so that one slow write leaves out no step


def note_start(spec: RunSpec, starts: list[dict[str, Any]], first_step: int) -> None:
    """Keep the time of the run from now on, and in ``starts`` that of a process that was killed."""
    *before, _ = starts
    earlier = read_starts(spec.run_dir, before)
    if earlier and "spent" in before[-1]:
        before[-1]["spent"] = to_entry(earlier[-1])
    goes_on = record.read(spec.run_dir).state != record.FINISHED
    clock = current()
    clock.device = device_kind(spec.accelerator)
    clock.open(spec.run_dir, earlier, first_step, goes_on=goes_on)


def callback(spec: RunSpec) -> L.Callback:
    """``WallTime``, which every rank has: ``slow_ranks`` asks each how long it has waited."""
    return WallTime()


class WallTime(L.Callback):
    """Counts the steps of this process, and what torch compiles."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Learn when torch compiles something."""
        on_compiling(begin_compile, end_compile)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the clock of this run."""
        self._clock = current()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Count the step."""
        self._clock.count_step(trainer.global_step)


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
        self._is_repeated = False
        self._waits = False
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._cause = cause
        # Within a process its own clock counts: that of the machine may be set meanwhile.
        self._since = self._origin = time.perf_counter() - (time.time() - began)
        self._file = -1  # closed
        self._write_s = 0.0  # in which training has waited for writes
        self._ends = threading.Event()

    def switch(self, cause: str) -> None:
        """Count what comes under this cause."""
        now = time.perf_counter()
        spent = now - self._since
        self._seconds[self._cause] += spent
        if self._waits:
            self.waited_s += spent
        self._since = now
        self._waits = cause == DATA
        if self._waits:
            self._is_repeated = self.step < self._repeats_until
        # Whatever steps wait for that are repeated, they are the price of the interruption.
        is_price = self._is_repeated and cause in (DATA, TRAINING)
        self._cause = REPEATED if is_price else cause

    def count_step(self, step: int) -> None:
        """Note how many optimizer steps the run has taken."""
        self.step = step
        now = time.perf_counter()
        may_write = self._write_s <= BURST_S + FRACTION * (now - self._origin)
        if self._file >= 0 and may_write:
            self._write_step()
            self._write_s += time.perf_counter() - now

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
        path = run_dir / TIME
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
        agent = time_of_start(environment.parent())
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


_clock: Clock | None = None


def current() -> Clock:
    """The clock of this process; a new one if there is none, or its run has ended."""
    global _clock
    if _clock is None:
        # A notebook was perhaps opened days ago.
        started = None if is_interactive() else time_of_start(os.getpid())
        _clock = Clock(time.time() if started is None else started, IMPORT)
    elif _clock.has_ended:
        _clock = Clock(time.time(), START)
    return _clock


def observe(before: str, phase: str) -> None:
    """Count what comes under the cause of this phase."""
    clock = current()
    if phase in (OUTSIDE, AWAY):
        # The process has its devices until it ends, and a script may test the run. But a notebook
        # may be open for days, and so may one in which a run was rejected.
        clock.switch(STOPPING)
        if phase == AWAY or is_interactive():
            clock.close()
        return
    # The run that this process has trained ends where the next one begins.
    if before == OUTSIDE and phase == START and clock.run_dir is not None:
        clock.close()
        clock = current()
    clock.switch(phase)


phases.observers.append(observe)


def find_spent(run_dir: Path) -> dict[str, Any]:
    """What ``run.json`` keeps of this process; empty unless it keeps the time of this run."""
    if _clock is None or _clock.run_dir != run_dir or _clock.has_ended:
        return {}
    return {"spent": to_entry(_clock.as_start())}


record.facts_of_start.append(find_spent)


def is_interactive() -> bool:
    """Whether a person types into this process, as in a notebook."""
    return hasattr(sys, "ps1")


def time_of_start(pid: int) -> float | None:
    """When a process has started, in seconds since 1970; None if that is not known."""
    started = process_table.start_of(pid)
    if started is None:
        return None
    if started.isdecimal():
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    # ps writes the time in the language of the user.
    with suppress(ValueError):
        return time.mktime(time.strptime(started))
    return None


# -- Compiling -------------------------------------------------------------------------------------

_before_compile: list[str] = []


def begin_compile(*_: Any) -> None:
    """Count what comes as compiling; ``torch.compile`` calls this."""
    _before_compile.append(phases.switch(COMPILE))


def end_compile(*_: Any) -> None:
    """Count what comes as what it was before."""
    if _before_compile:
        phases.switch(_before_compile.pop())


def on_compiling(begin: Callable[..., None], end: Callable[..., None]) -> None:
    """Call ``begin`` before torch compiles something, and ``end`` afterwards.

    torch has no public name for it. 2.6 calls them without arguments, later versions with one.
    """
    # Importing it takes a second, which only a model that is compiled should cost.
    if "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo.callback import callback_handler

    # ``torch.compiler.reset`` forgets them, so they are registered again for each run.
    if begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
