"""Starts the jobs of a grid, so many at once, and waits for them."""

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import remedy_of
from samestep.grid.job_process import (
    MAX_STARTS,
    claim,
    is_killed,
    last_error,
    start_with_output,
)
from samestep.grid.jobs import Job, is_finished, write_jobs, write_outcome
from samestep.grid.slots import Slot
from samestep.ranks import process

POLL_S = 0.2  # between two looks at the jobs


@dataclass(frozen=True)
class Grid:
    """What a driver needs to know.

    Args:
        name: of the grid.
        folder: where the grid itself writes.
        jobs: all of them.
        program: what Python runs for a job, before the overrides.
        variables: of every job.
        stop_on_failure: whether a job that fails stops the others.
        is_elsewhere: whether run directories cannot be seen from here.
        is_left: whether the program only submits the run.
    """

    name: str
    folder: Path
    jobs: Sequence[Job]
    program: Sequence[str]
    variables: dict[str, str]
    stop_on_failure: bool = False
    is_elsewhere: bool = False
    is_left: bool = False


@dataclass
class Running:
    """A job that runs."""

    job: Job
    slot: Slot
    process: subprocess.Popen[bytes]
    log: Path
    offset: int  # bytes of the log that were printed
    is_told_to_end: bool = False

    def tell_to_end(self) -> None:
        """Send SIGTERM, once: a second one would interrupt a run that is saving."""
        if not self.is_told_to_end:
            self.is_told_to_end = True
            self.process.terminate()

    def print_news(self, *, is_over: bool) -> None:
        """Print the new lines of the log; of one that is not complete only at the end."""
        with self.log.open("rb") as file:
            file.seek(self.offset)
            news = file.read()
        if not is_over:
            news = news[: news.rfind(b"\n") + 1]
        self.offset += len(news)
        for line in news.decode(errors="replace").splitlines():
            print(f"[{self.job.run_id}] {line}", flush=True)


class Driver:
    """Trains the jobs of a grid that are not finished.

    Any number of drivers may do so at once, on one machine or on several that share the folder: a
    job is claimed by the lock of its log, which its processes hold until the last one has ended.

    Args:
        grid: what to train.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.logs = grid.folder / "logs"
        self.pending: list[Job] = []
        for job in grid.jobs:
            if not self._is_finished(job):
                self.pending.append(job)
        self.running: list[Running] = []
        self.starts: dict[str, int] = {}
        self.failed: dict[str, str] = {}  # why, by run id
        self.signum = 0
        self.is_stopping = False
        self.has_said_why = False
        self.is_unwritable = False
        self.slots: list[Slot] = []

    def run(self, shares: Sequence[dict[str, str]]) -> int:
        """Train what is missing.

        Args:
            shares: more variables, for each job that runs at the same time.

        Returns:
            0, 1 if a job has failed, or 128 and the number of a signal.
        """
        total = len(self.grid.jobs)
        done = total - len(self.pending)
        print(f"Grid {self.grid.name}: {done} of {total} runs are finished", flush=True)
        if not self.pending:
            return 0
        slots = self.grid.folder / "slots"
        slots.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        for number, variables in enumerate(shares):
            self.slots.append(Slot(slots, number, self.logs, variables))
        write_jobs(self.grid.folder, self.grid.jobs)
        self._stop_at_signals()
        try:
            self._loop()
        finally:
            # After an error, such as that of a full disk; otherwise none runs any more.
            self.stop()
            self._wait()
        if self.signum:
            return 128 + self.signum
        return 1 if self.failed else 0

    def stop(self) -> None:
        """Start no more jobs, and have the running ones save and end."""
        self.is_stopping = True
        for running in self.running:
            running.tell_to_end()

    def _loop(self) -> None:
        while (self.pending and not self.is_stopping) or self.running:
            if not self.is_stopping:
                self._start_jobs()
                self._say_if_idle()
            time.sleep(POLL_S)
            self._collect()

    def _start_jobs(self) -> None:
        """Start a job in each free place."""
        for slot in self.slots:
            if not self.pending:
                return
            is_free = slot.file is None and slot.take()
            if is_free and not self._start_in(slot):
                slot.release()

    def _say_if_idle(self) -> None:
        """Say once why nothing starts."""
        if self.pending and not self.running and not self.starts and not self.has_said_why:
            self.has_said_why = True
            print("Waiting for the runs that an earlier command has started", flush=True)

    def _start_in(self, slot: Slot) -> bool:
        """Start the first job that no other driver has; return whether there is one."""
        for job in list(self.pending):
            log = self.logs / f"{job.run_id}.log"
            output = claim(log)
            if output is None:
                continue
            self.pending.remove(job)
            with output:
                # Another driver may have trained it since. Only the lock says that it has ended.
                if self._is_finished(job):
                    self._print_end(job, "was trained by another process")
                    continue
                offset = output.tell()
                slot.note(job.run_id)
                # Before it starts: if this driver is killed, the run may still finish. On a full
                # disk this ends the driver: the log could not say why the run fails.
                write_outcome(self.grid.folder, job, None)
                variables = self.grid.variables | slot.variables | {"RUN_ID": job.run_id}
                program = [*self.grid.program, *job.overrides]
                process = start_with_output(program, variables, output)
            self.starts[job.run_id] = self.starts.get(job.run_id, 0) + 1
            running = Running(job, slot, process, log, offset)
            self.running.append(running)
            # A signal may have come in between.
            if self.is_stopping:
                running.tell_to_end()
            return True
        return False

    def _collect(self) -> None:
        """Print what the jobs have printed, and note how those have ended that have."""
        for running in list(self.running):
            # Asked before the log is read, so that nothing of a job that has ended is missing.
            exit_code = running.process.poll()
            running.print_news(is_over=exit_code is not None)
            if exit_code is not None:
                self.running.remove(running)
                running.slot.release()
                self._end(running, exit_code)

    def _end(self, running: Running, exit_code: int) -> None:
        """Note how a job has ended."""
        job = running.job
        if exit_code == 0:
            self._end_well(job)
            return
        if self.is_stopping and is_killed(exit_code):
            return
        if is_killed(exit_code) and self.starts[job.run_id] < MAX_STARTS:
            # Once its last process has ended: a rank may outlive the one that was killed.
            print(f"{job.run_id}: was killed, and starts again", flush=True)
            self.pending.insert(0, job)
            return
        # On a full disk the log is empty.
        error = last_error(running.log) or "its log is empty"
        why = f"exit code {exit_code}: {error}"
        self.failed[job.run_id] = why
        self._write_outcome(job, exit_code, why)
        self._print_end(job, f"failed: {why}")
        if self.grid.stop_on_failure and not self.is_stopping:
            self.stop()

    def _end_well(self, job: Job) -> None:
        if self.grid.is_left:
            # How the run itself ends is not known here.
            self._print_end(job, "submitted")
            return
        self._write_outcome(job, 0)
        self._print_end(job, "finished")

    def _print_end(self, job: Job, what: str) -> None:
        left = len(self.pending) + len(self.running)
        print(f"{job.run_id}: {what}; {left} of {len(self.grid.jobs)} runs are left", flush=True)

    def _is_finished(self, job: Job) -> bool:
        return is_finished(self.grid.folder, job, is_elsewhere=self.grid.is_elsewhere)

    def _write_outcome(self, job: Job, exit_code: int, why: str = "") -> None:
        try:
            write_outcome(self.grid.folder, job, exit_code, why)
        except OSError as error:
            # The other jobs may have their disks elsewhere, and the run itself knows how it ended.
            if not self.is_unwritable:
                print(describe_full(self.grid.folder, error), flush=True)
            self.is_unwritable = True

    def _wait(self) -> None:
        """Wait for the jobs that were told to end."""
        while self.running:
            time.sleep(POLL_S)
            self._collect()

    def _stop_at_signals(self) -> None:
        def stop(signum: int, frame: object) -> None:
            # A second signal must not interrupt the wait for the jobs, which are saving.
            if not self.signum:
                self.signum = signum
                print(f"{signal.Signals(signum).name}: the runs save and end ...", flush=True)
                self.stop()

        for signum in process.signals_to_handle():
            signal.signal(signum, stop)


def describe_full(folder: Path, error: OSError) -> str:
    """What happened to the folder of a grid that cannot be written, and how to go on."""
    return (
        f"{error.filename or folder} cannot be written: {error.strerror}; {remedy_of(error)}, and "
        "repeat the command to continue"
    )
