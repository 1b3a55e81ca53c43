"""What this process does at the moment, for who adds up its time. Imports no torch.

Nothing depends on it. ``samestep.plugins.wall_time`` observes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

IMPORT, START, SEARCH, VALIDATION = "import", "start", "search", "validation"
DATA, TRAINING, SAVING, STOPPING = "data", "training", "saving", "stopping"
OUTSIDE = "outside"
"""The script goes on, after a function of the Trainer."""
AWAY = "away"
"""The run is rolled back: this process trains it no longer."""

observers: list[Callable[[str, str], None]] = []
"""Each is called with the phase of before, and the one that begins."""
_current = IMPORT


def switch(phase: str) -> str:
    """Begin a phase; returns the one before."""
    global _current
    before, _current = _current, phase
    for observe in observers:
        observe(before, phase)
    return before


@contextmanager
def spend(phase: str) -> Iterator[None]:
    """Be in this phase within a block, or a function."""
    before = switch(phase)
    try:
        yield
    finally:
        switch(before)
