"""What a run writes down about itself: its code, its machine, its logs and what it learned.

Nothing here imports torch at the top, and no file here is ever half written.
"""

import csv
import json
import logging
import os
import platform
import re
import subprocess
import warnings
from contextlib import suppress
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from project import environment

MAX_DIFF = 1_000_000  # characters
EXPECTED = (  # warnings that ask nothing of the user of this project
    ".*treespec, LeafSpec.*",  # Lightning calls torch's pytree by its old name
    "The number of training batches .* is smaller than the logging interval.*",  # none per step
    "Grad strides do not match bucket view strides.*",  # DDP with one-channel images; harmless
    "Checkpoint directory .* exists and is not empty.*",  # a run that continues
    ".*does not have many workers.*",  # images in memory need none
    "It is recommended to use .*sync_dist=True.*",  # figures are summed over the ranks before
)
_SECRET = r"(?:token|passw(?:or)?d|secret|api[-_]?key|access[-_]?key|credentials?)(?![a-z])"
_SECRET_NAME = re.compile(rf"(?<![a-z]){_SECRET}", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(rf"((?<![a-z]){_SECRET}[\w-]*\s*[=:]\s*).+", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://)[^/\s@]+(@)")


def write_text(path: Path, text: str) -> None:
    """Write ``path`` whole or not at all: a crash at any moment leaves the old text or the new.

    Raises:
        OSError: naming ``path``, if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def redacted(value: Any, *, secret: bool = False) -> Any:
    """A copy of plain ``value`` without secrets, each replaced by ``***``.

    Secret are strings under a key such as ``api_key`` or ``hf_token``, the values of secret
    environment variables within any string, and user names and passwords within addresses.
    """
    if isinstance(value, dict):
        return {
            key: redacted(item, secret=secret or bool(_SECRET_NAME.search(str(key))))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redacted(item, secret=secret) for item in value]
    if isinstance(value, str):
        return "***" if secret else _URL_PASSWORD.sub(r"\1***\2", environment.redact(value))
    return value


def record_attempt(logs: Path, argv: list[str], seed: int) -> None:
    """Add this start of the run to ``environment.json``, and its uncommitted code to ``git.diff``.

    Both are free of secrets. A later start with other code gets a ``git-<n>.diff`` of its own.
    """
    path = logs / "environment.json"
    attempts = json.loads(path.read_text()) if path.exists() else []
    git, diff = code_state(Path(__file__).parent)
    if diff:
        known = [file.name for file in logs.glob("git*.diff") if file.read_text() == diff]
        new = f"git-{len(attempts) + 1}.diff" if attempts else "git.diff"
        git["diff"] = known[0] if known else new
        if not known:
            write_text(logs / new, diff)
    arguments = [_SECRET_ARGUMENT.sub(r"\1***", argument) for argument in argv]
    attempt = {"command": arguments, "git": git, "seed": seed, **surroundings()}
    write_text(path, json.dumps([*attempts, redacted(attempt)], indent=2) + "\n")


def code_state(code: Path) -> tuple[dict[str, Any], str]:
    """The commit ``code`` is at, and what differs from it: new files by name, others in full.

    Outside a git checkout, or without git, the commit is None and the difference empty.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-c", "safe.directory=*", *arguments]
        try:
            done = subprocess.run(command, cwd=code, capture_output=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.decode(errors="replace")

    status = git("status", "--porcelain")
    diff = environment.redact(f"{status}\n{git('diff', '--no-ext-diff', 'HEAD')}" if status else "")
    if len(diff) > MAX_DIFF:
        diff = f"{diff[:MAX_DIFF]}\n... cut: the whole is {len(diff):,} characters\n"
    commit = git("rev-parse", "HEAD").strip() or None
    return {"commit": commit, "dirty": bool(status), "diff": None}, diff


def surroundings() -> dict[str, Any]:
    """Time, machine, processes and the version of every installed package."""
    import torch  # asked for the GPUs

    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "")
    gpus = range(torch.cuda.device_count())
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "world_size": environment.world_size(),
        "num_nodes": environment.num_nodes(),
        "packages": dict(sorted((package.name, package.version) for package in distributions())),
    }


def read_history(run_dir: Path) -> list[dict[str, float]]:
    """The rows of ``metrics.csv`` in order of their step, each without its empty columns."""
    path = run_dir / "metrics.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def final_metrics(run_dir: Path) -> dict[str, float]:
    """The newest value of each learning metric in ``metrics.csv``: no speeds, no learning rates."""
    newest = {name: value for row in read_history(run_dir) for name, value in row.items()}
    stages = ("train/", "val/", "test/")
    return {
        name: newest[name]
        for name in sorted(newest)
        if name.startswith(stages) and not name.endswith("_per_second")
    }


class _PlainFormatter(logging.Formatter):
    """The message alone; of a Python warning its first line, without file and line number."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name == "py.warnings":  # "<file>:<line>: UserWarning: <message>"
            text = record.getMessage().splitlines()[0].split(": ", 1)[-1]
        return environment.redact(text)


class _FileFormatter(logging.Formatter):
    """Time, level, library and message, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return environment.redact(super().format(record))


def log_to_files(run_dir: Path) -> None:
    """Send log records and warnings of every library to ``logs/rank-<n>.log`` of this rank.

    Appends to the file. On rank zero warnings and errors appear on stderr too; Lightning's
    notes ("GPU available: ...") do not. Calling it again moves on to another run's file.
    """
    import lightning as L  # brings handlers of its own, removed here

    for library in (L, L.pytorch, L.fabric):
        logger = logging.getLogger(library.__name__)
        logger.handlers.clear()
        logger.propagate = True
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.name == __name__]:
        root.removeHandler(old)
        old.close()
    path = run_dir / "logs" / f"rank-{environment.rank()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    handlers[0].setFormatter(_FileFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if environment.rank() == 0:
        handlers.append(logging.StreamHandler())
        handlers[1].setFormatter(_PlainFormatter("%(levelname)s: %(message)s"))
        handlers[1].setLevel(logging.WARNING)
    for handler in handlers:
        handler.set_name(__name__)
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for message in EXPECTED:
        warnings.filterwarnings("ignore", message)
