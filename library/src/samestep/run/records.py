"""What a run writes down about itself: its code, its machine and its logs."""

import csv
import io
import json
import logging
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from samestep.ranks import environment, secrets
from samestep.ranks.secrets import hide_assigned, hide_quoted, redact_values
from samestep.run.files import read_text, set_aside, write_text

log = logging.getLogger(__name__)

NO_RESULT = re.compile(r"epoch|step|(step|time)/.*|lr([-/].*)?|.*_per_second|DeviceStatsMonitor.*")

EXPECTED = (  # warnings that ask nothing of the user of this project
    ".*treespec, LeafSpec.*",  # Lightning calls torch's pytree by its old name
    "The number of training batches .* is smaller than the logging interval.*",  # none per step
    "Grad strides do not match bucket view strides.*",  # DDP with inputs of one channel; harmless
    "You're resuming from a checkpoint that ended before the epoch ended.*",  # ours resumes
    "Checkpoint directory .* exists and is not empty.*",  # a run that continues
    ".*does not have many workers.*",  # data in memory need none
    "The `srun` command is available on your system.*",  # one process needs no srun
    ".*all_gather is deprecated.*",  # which Lightning calls
)


def record_attempt(
    logs: Path, argv: list[str], seed: int, facts: Mapping[str, Any] | None = None
) -> None:
    """Add this start to ``environment.json``; ``git.diff`` is its uncommitted code. No secrets.

    ``facts`` has the ``run_id`` and ``config`` that the checkpoints of this start carry, and what
    the start has overridden.
    """
    path = logs / "environment.json"
    attempts = read_attempts(logs)
    commit, diff = code_state(Path.cwd())
    command = [secrets.redact_argument(argument) for argument in argv]
    git = {"commit": commit, "dirty": bool(diff)}
    attempt = {"command": command, **(facts or {}), "git": git, "seed": seed, **surroundings()}
    write_text(logs / "git.diff", diff)
    write_text(path, json.dumps([*attempts, redact_values(attempt)], indent=2) + "\n")


def code_state(code: Path) -> tuple[str | None, str]:
    """The commit ``code`` is at, and what differs from it: new files by name only.

    Without git, as in a container, it is the commit that PROJECT_REVISION names, if it is set.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-c", "safe.directory=*", *arguments]
        try:
            done = subprocess.run(command, cwd=code, capture_output=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode(errors="replace")

    status = git("status", "--porcelain")
    diff = f"{status}\n{git('diff', '--no-ext-diff', 'HEAD')}" if status else ""
    commit = git("rev-parse", "HEAD").strip() or environment.variable("PROJECT_REVISION")
    return commit, secrets.redact(hide_in_diff(diff))


def hide_in_diff(diff: str) -> str:
    """Replace by ``***`` what has a secret name in the changed files.

    In a program only texts in quotes: what else follows a name there is code.
    """
    hidden = []
    for part in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE):
        if part.partition("\n")[0].endswith(".py"):
            hidden.append(hide_quoted(part))
        else:
            hidden.append("\n".join(map(hide_assigned, part.split("\n"))))
    return "".join(hidden)


def cpu_name() -> str:
    """What the processors of this machine are called."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    return names[0] if names else platform.processor() or platform.machine()


def surroundings() -> dict[str, Any]:
    """Time, machine, processes and the version of every installed package."""
    import torch  # asked for the GPUs

    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "world_size": environment.world_size(),
        "num_nodes": environment.num_nodes(),
        "packages": installed_packages(),
    }


def installed_packages() -> dict[str, str]:
    """The version of every installed package, by name."""
    packages = []
    for package in distributions():
        # A long text follows the fields. `package.metadata` would parse that too.
        text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
        fields = dict(re.findall("^(Name|Version): *(.+)", text.partition("\n\n")[0], re.MULTILINE))
        if len(fields) == 2:  # else its files are damaged
            packages.append((fields["Name"], fields["Version"]))
    return dict(sorted(packages))


def read_attempts(logs: Path) -> list[dict[str, Any]]:
    """The starts in ``environment.json``, oldest first; none if the file is absent or damaged."""
    attempts = read_json(logs / "environment.json", list) or []
    return [attempt for attempt in attempts if isinstance(attempt, dict)]


def read_json(path: Path, kind: type) -> Any:
    """What a JSON file holds; None if it is absent, damaged, or not of this kind."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, kind) else None


def read_history(run_dir: Path) -> list[dict[str, float]]:
    """The rows of ``metrics.csv`` in order of their step, each without its empty columns.

    There are none if the file is absent or damaged; ``why_damaged`` tells which.
    """
    try:
        return _read_rows(run_dir / "metrics.csv")
    except (OSError, ValueError, csv.Error):
        return []


def why_damaged(run_dir: Path) -> str | None:
    """Why ``metrics.csv`` cannot be read; None if it can, or is absent."""
    path = run_dir / "metrics.csv"
    try:
        _read_rows(path)
    except (OSError, ValueError, csv.Error) as error:
        return str(error) if path.exists() else None
    return None


def is_result(name: str) -> bool:
    """Whether a column of ``metrics.csv`` says what a run has learned: no step, rate or speed."""
    return not NO_RESULT.fullmatch(name)


def _read_rows(path: Path) -> list[dict[str, float]]:
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if table.fieldnames is None or list(table.fieldnames[:2]) != ["epoch", "step"]:
        raise ValueError("it has no columns epoch and step")
    rows = []
    for row in table:
        if None in row or not row["step"]:
            raise ValueError(f"line {table.line_num} is damaged")
        rows.append({name: float(value) for name, value in row.items() if value})
    return rows


class _Redacted(logging.Formatter):
    """A log line without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return secrets.redact(super().format(record))


def mute_lightning() -> None:
    """Take away the handlers that Lightning brings, and the warnings that ask nothing of users."""
    import lightning as L

    for library in (L, L.pytorch, L.fabric):
        logger = logging.getLogger(library.__name__)
        logger.handlers.clear()
        logger.propagate = True
    silence_expected_warnings()


def silence_expected_warnings() -> None:
    """Ignore the warnings that ask nothing of users."""
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message)


def log_to_files(run_dir: Path) -> None:
    """Append what every library logs, or warns of, to ``logs/rank-<n>.log`` of this rank.

    On rank zero warnings and errors appear on stderr too. In a sweep each run has its own file.
    """
    mute_lightning()
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.name == __name__]:
        root.removeHandler(old)
        old.close()
    path = run_dir / "logs" / f"rank-{environment.rank()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = []
    if environment.rank() == 0:
        screen = logging.StreamHandler()
        screen.setFormatter(_Redacted("%(levelname)s: %(message)s"))
        screen.setLevel(logging.WARNING)
        handlers.append(screen)
    logging.raiseExceptions = False  # a full disk loses lines of the log, not the run
    try:
        if path.exists() and not path.is_file():
            set_aside(path, "it is no file")
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(_Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    except OSError as error:
        log.warning("%s cannot be written: %s; the run goes on without it", path, error.strerror)
    for handler in handlers:
        handler.set_name(__name__)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
