"""What the system knows about other processes: from ``/proc`` on Linux, otherwise from ``ps``."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PS_S = 10.0  # seconds that ps may take


def start_of(pid: int) -> str | None:
    """When a process has started, as text that is the same each time; None if that is not known."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        # In clock ticks since boot. The name of the program comes before it, in brackets, and may
        # have spaces.
        return stat.read_text().rpartition(")")[2].split()[19]
    return _ps("-o", "lstart=", "-p", str(pid)).strip() or None


def time_of_start(pid: int) -> float | None:
    """When a process has started, in seconds since 1970; None if that is not known."""
    started = start_of(pid)
    if started is None:
        return None
    if started.isdecimal():
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    # ps writes the time in the language of the user.
    with suppress(ValueError):
        return time.mktime(time.strptime(started))
    return None


def descendants_of(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have started."""
    parents = [pid]
    found: list[int] = []
    # Once for all of them: ps takes some milliseconds.
    table = None if Path("/proc/self/task").exists() else _children_of_all()
    while parents:
        parent = parents.pop()
        children = _children_in_proc(parent) if table is None else table.get(parent, [])
        found += children
        parents += children
    return found


def _children_in_proc(pid: int) -> list[int]:
    children: list[int] = []
    # It may have ended meanwhile.
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return children


def _children_of_all() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for line in _ps("-A", "-o", "pid=,ppid=").splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    return children


def _ps(*arguments: str) -> str:
    """What ps(1) prints; nothing if it fails."""
    try:
        done = subprocess.run(
            ["ps", *arguments], capture_output=True, text=True, timeout=PS_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
