"""What the system knows about other processes: from ``/proc`` on Linux, otherwise from ``ps``."""

import subprocess
from pathlib import Path

PS_S = 10.0  # seconds that ps may take


def start_of(pid: int) -> str | None:
    """When a process has started, as text that is the same each time; None if that is not known."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        # In clock ticks since boot. The name of the program comes before it, in brackets, and may
        # have spaces.
        return stat.read_text().rpartition(")")[2].split()[19]
    return ps("-o", "lstart=", "-p", str(pid)).strip() or None


def ps(*arguments: str) -> str:
    """What the program ps prints; nothing if it fails."""
    try:
        done = subprocess.run(
            ["ps", *arguments], capture_output=True, text=True, timeout=PS_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
