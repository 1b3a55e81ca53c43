"""One trial: a process with a run directory, which outlives a search that is killed.

The standard output of the process is a file that is locked (flock). The lock belongs to the open
file, so every process of the trial holds it, also after the search has ended. Whoever cannot lock
the file must not start the trial, because another process still runs it.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import fsspec  # type: ignore[import-untyped]

from samestep.ranks import environment
from samestep.ranks.failure import PREFIX
from samestep.run.metrics import read_history

COPY_S = 5.0  # seconds between two looks at the copy of a run in a store
JOB = "samestep.sweep.cluster_job"


class TrialProcess:
    """The process of a trial: ``train.py``, or the supervisor of a job on a cluster.

    Args:
        run_id: of the trial.
        folder: of the search; the run directory is ``<folder>/<run_id>``.
        overrides: of the run.
        on_cluster: whether a cluster trains it.
        devices: what the process may see, such as ``0,1``; None: everything.
        script: the program, a stand-in for ``train.py`` in tests.
    """

    def __init__(
        self,
        run_id: str,
        folder: Path,
        overrides: Sequence[str],
        *,
        on_cluster: bool = False,
        devices: str | None = None,
        script: Path,
    ) -> None:
        self.run_id = run_id
        self.folder = folder
        self.overrides = list(overrides)
        self.devices = devices
        self.command = [sys.executable, str(script)]
        if on_cluster:
            self.command = [sys.executable, "-m", JOB]
        self.log = folder / "logs" / f"{run_id}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> bool:
        """Start the process, unless one of an earlier search still runs.

        Returns:
            Whether it was started.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            try:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.process = subprocess.Popen(
                [*self.command, *self.overrides, f"run_root={self.folder}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables(),
                start_new_session=True,  # a Ctrl-C in the terminal is for the search alone
            )
        self._pid_file.write_text(str(self.process.pid))
        return True

    def poll(self) -> int | None:
        """The exit code; None while it runs, or while one of an earlier search does."""
        return self.process.poll() if self.process else None

    def send(self, signum: int) -> None:
        """Send a signal to the process, also to one of an earlier search."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process:
                self.process.send_signal(signum)
            elif (pid := self._find_orphan()) is not None:
                os.kill(pid, signum)

    def kill(self) -> None:
        """End the process and its children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process and self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def is_running(self) -> bool:
        """Whether a process of the trial runs, started here or by an earlier search."""
        if not self.log.exists():
            return False
        with self.log.open("ab") as output:
            try:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def last_error(self) -> str:
        """The last error message in the output, otherwise its last line."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return "no output"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line.removeprefix(PREFIX) for line in lines if line.startswith(PREFIX)]
        return errors[-1] if errors else lines[-1] if lines else "no output"

    @property
    def _pid_file(self) -> Path:
        return self.log.with_suffix(".pid")

    def _find_orphan(self) -> int | None:
        """The process of an earlier search, if it writes into our file; its number may be reused.

        Where there is no /proc, it is not known, and the process is waited for.
        """
        try:
            pid = int(self._pid_file.read_text())
            is_it = Path(f"/proc/{pid}/fd/1").readlink() == self.log.resolve()
        except (OSError, ValueError):
            return None
        return pid if is_it else None

    def _variables(self) -> Mapping[str, str]:
        variables = environment.variables() | {"RUN_ID": self.run_id}
        if self.devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.devices
        return variables


class Metrics:
    """The values of one metric of a run, read while the run trains.

    Args:
        run_dir: of the run; or where this machine keeps what it reads from ``url``.
        monitor: the metric.
        url: the address of the run's copy in a store; None: the run directory is here.
    """

    def __init__(self, run_dir: Path, monitor: str, url: str | None = None) -> None:
        self.run_dir = run_dir
        self.monitor = monitor
        self.url = url
        self._due = 0.0

    def read(self, *, now: bool = False) -> list[float]:
        """The values so far, one for each validation, the oldest first.

        Args:
            now: ask the store again, although it was asked a moment ago.
        """
        if self.url and (now or time.monotonic() >= self._due):
            self._fetch("metrics.csv")
            self._due = time.monotonic() + COPY_S
        rows = read_history(self.run_dir)
        return [row[self.monitor] for row in rows if self.monitor in row]

    def _fetch(self, name: str) -> None:
        """Download a file; a store that does not answer is asked again at the next look."""
        with contextlib.suppress(Exception):
            fs, root = fsspec.url_to_fs(self.url)
            content = fs.cat_file(f"{root}/{name}")
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / name).write_bytes(content)
