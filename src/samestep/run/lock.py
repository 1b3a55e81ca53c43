"""One process trains in a run directory: it holds a lock there until it ends, however it ends."""

import fcntl
import os
import platform
import time
from datetime import datetime
from pathlib import Path

from samestep.errors import ConfigError

FILE = ".claim"  # the file that is locked; it names the process
TIMEOUT_S = 10

_held: set[Path] = set()  # run directories of this process


def acquire(run_dir: Path) -> None:
    """Own the run directory until this process ends, however it ends.

    Waits a moment for an owner that is about to end: an evicted pod, a rank that was restarted.

    Raises:
        ConfigError: naming the owner, if another process trains in this directory.
    """
    if run_dir.absolute() in _held:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    # Nobody closes this file: the lock ends with the process.
    file = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT)
    for _ in range(TIMEOUT_S):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(1)
            continue
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {platform.node()} since {now}".encode())
        _held.add(run_dir.absolute())
        return
    owner = os.read(file, 200).decode()
    os.close(file)
    raise ConfigError(
        f"{run_dir} is in use by {owner}; wait for it or stop it, or begin another one with "
        "RUN_ID=<another name>"
    )


def forget(run_dir: Path) -> None:
    """Give up the lock of a directory that this process has removed."""
    _held.discard(run_dir.absolute())


def is_held(run_dir: Path) -> bool:
    """Whether a process trains in the run directory: it holds the lock until it ends."""
    try:
        with (run_dir / FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
