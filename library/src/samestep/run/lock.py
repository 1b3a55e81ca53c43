"""One process trains in a run directory: it holds a lock there until it ends, however it ends."""

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

_held: set[Path] = set()  # run directories of this process


def acquire(run_dir: Path) -> None:
    """Own the run directory until this process ends, however it ends.

    Waits a moment for an owner that is about to end: an evicted pod, a rank that was restarted.

    Raises:
        ConfigError: naming the owner, if another process trains in this directory.
    """
    if run_dir.resolve() in _held:
        return
    path, owner = run_dir / FILE, "another process"
    for _ in range(TIMEOUT_S):
        run_dir.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its owner has just removed the directory
            # Nobody closes the file that is locked: the lock ends with the process.
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # An owner that gave up may have removed the file while this process waited for it,
                # and a third one may hold the file that has its name now.
                if os.path.samestat(os.fstat(file), path.stat()):
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
        f"{run_dir} is in use by {owner}; wait for it or stop it, or start another one with "
        "RUN_ID=<another name>"
    )


def forget(run_dir: Path) -> None:
    """Give up the lock of a directory that this process has removed."""
    _held.discard(run_dir.resolve())


def is_held(run_dir: Path) -> bool:
    """Whether a process trains in the run directory: it holds the lock until it ends."""
    try:
        with open_regular(run_dir / FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
