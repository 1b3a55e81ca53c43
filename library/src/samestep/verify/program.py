"""One program of an experiment: started, ended with all its ranks, and what it has printed."""

import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from samestep.ranks.failure import EXIT_CONFIG, PREFIX
from samestep.ranks.process_tree import descendants_of
from samestep.verify.plan import FIRST_STEP

TIMED_OUT = 124  # as of timeout(1)
LOOKS_LIKE_AN_ERROR = re.compile(rf"(\w+\.)*\w*Error\b|{PREFIX}")


class Ended(Exception):
    """No program may be started any more."""


class Attempt(NamedTuple):
    """One program: its exit code, and what it printed before its first step and after it."""

    code: int
    before: str
    after: str

    @property
    def is_rejection(self) -> bool:
        """Whether it ended with one message, before it trained."""
        has_message = re.search(f"^{PREFIX}", self.before, re.M) is not None
        has_traceback = "Traceback" in self.before
        return self.code == EXIT_CONFIG and has_message and not has_traceback and not self.after

    @property
    def lines(self) -> list[str]:
        """All that it printed, without the mark of the first step."""
        return (self.before + self.after).strip().splitlines()

    @property
    def why(self) -> str:
        """The last line that looks like an error, or else the last line."""
        # It was killed by us, so its last line says nothing.
        if self.code == TIMED_OUT:
            return "it has not ended in time"
        lines = self.lines or [""]
        chosen = lines[-1]
        for line in reversed(lines):
            if LOOKS_LIKE_AN_ERROR.match(line):
                chosen = line
                break
        return f"exit code {self.code}: {chosen[:200]}"


class Programs:
    """The programs of some experiments, of which all end when one must.

    A signal raises in the main thread only. There it could come while a program is started, whose
    number nothing knows yet: so other threads call ``run``, and the main thread ``end_all``.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._must_end = threading.Event()

    def run(
        self, command: Sequence[str], folder: Path, variables: Mapping[str, str], timeout_s: float
    ) -> Attempt:
        """Run a command in a folder, and end it with all its ranks when it takes too long.

        Raises:
            Ended: after ``end_all``.
            OSError: if it cannot be started.
        """
        assert threading.current_thread() is not threading.main_thread()
        if self._must_end.is_set():
            raise Ended
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            # In a session of its own: a Ctrl-C is for us, and we end all of its ranks.
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                # ``end_all`` may have been called since the program was started, and not have
                # found it.
                if self._must_end.is_set():
                    raise Ended
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                end_with_ranks(process)
                self._running.discard(process)
            said.seek(0)
            before, _, after = said.read().partition(FIRST_STEP)
        return Attempt(code, before, after)

    def end_all(self) -> None:
        """Kill all programs that other threads wait for; none is started from now on."""
        self._must_end.set()
        for process in list(self._running):
            end_with_ranks(process)


def end_with_ranks(process: "subprocess.Popen[bytes]") -> None:
    """Kill a program, and the sessions of the ranks that it has started."""
    # Read before the program is killed: afterwards nothing says that its ranks were its own.
    ranks = descendants_of(process.pid) if process.poll() is None else []
    for pid in [process.pid, *ranks]:
        # A program that has ended leaves ranks behind only if it was killed itself.
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    process.wait()
