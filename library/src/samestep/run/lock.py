"""The lock of a run directory: at most one process trains there."""

import fcntl
import os
import platform
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from samestep.errors import ConfigError
from samestep.run.files import open_regular

FILE = ".claim"  # the file that is locked; it names the process
TIMEOUT_S = 10

_held: set[Path] = set()  # run directories that this process has locked


def acquire(run_dir: Path) -> None:
    """Lock the run directory until this process ends, for whatever reason.

    Waits up to 10 s for an owner that is shutting down, such as an evicted pod.

    Raises:
        ConfigError: naming the owner, if another process trains in this directory.
    """
    if run_dir.resolve() in _held:
        return
    path, owner = run_dir / FILE, "another process"
    for _ in range(TIMEOUT_S):
        run_dir.mkdir(parents=True, exist_ok=True)
        # The owner may remove the directory just now, when it rolls a failed start back.
        with suppress(FileNotFoundError):
            # This file descriptor is never closed: the kernel releases the lock with the process,
            # also after SIGKILL.
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            if _try_lock(file, path):
                now = datetime.now().astimezone().isoformat(timespec="seconds")
                os.ftruncate(file, 0)
                me = f"process {os.getpid()} on {platform.node()} since {now}"
                os.write(file, me.encode())
                _held.add(run_dir.resolve())
                return
            owner = os.read(file, 200).decode() or owner
            os.close(file)
            time.sleep(1)
    raise ConfigError(
        f"{run_dir} is in use by {owner}; wait for it or stop it, or start another run with "
        "RUN_ID=<another name>"
    )


def note_owner(run_dir: Path) -> None:
    """Print which process trains in the run directory, if one does.

    For a program that has not imported torch: ``acquire`` comes much later, and then waits.
    """
    if is_held(run_dir):
        # The owner may remove the directory just now.
        with suppress(FileNotFoundError):
            owner = (run_dir / FILE).read_text()
            print(
                f"Note: {run_dir} is in use by {owner}; this start waits for it, until {TIMEOUT_S} "
                "s after its imports; RUN_ID=<another name> starts another run",
                flush=True,
            )


def _try_lock(file: int, path: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # While this process opened the file, its owner may have removed it, and a third process may
    # have created a new one of that name. Then this lock protects nothing.
    return os.path.samestat(os.fstat(file), path.stat())


def forget(run_dir: Path) -> None:
    """Drop the lock of a directory that this process has removed."""
    _held.discard(run_dir.resolve())


def is_held(run_dir: Path) -> bool:
    """Whether a process trains in the run directory."""
    return is_locked(run_dir / FILE)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of this file; not if there is no such file."""
    try:
        # A shared lock, so that several readers at once do not take each other for the owner.
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
