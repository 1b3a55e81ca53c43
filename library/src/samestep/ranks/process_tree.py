"""The processes that a program has started, with those that they have started."""

from contextlib import suppress
from pathlib import Path

from samestep.ranks import process_table


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
    for line in process_table.ps("-A", "-o", "pid=,ppid=").splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    return children
