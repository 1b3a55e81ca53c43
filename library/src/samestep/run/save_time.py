"""How long saves take, against the time that a cluster gives a run to save. Imports no torch.

A run that saves too slowly for its grace period works until the first eviction, and loses then what
it has trained since the last save. So it says so while there is time.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from samestep.option_names import option
from samestep.ranks import environment

NOTE = "Note: a checkpoint takes"
"""How the note begins; ``samestep status`` looks for it."""
FRACTION = 0.5  # of the time after SIGTERM: a step, an epoch's end or a busy disk come on top


class SaveTime:
    """Times the saves of this rank."""

    def __init__(self) -> None:
        given = environment.variable(environment.SHUTDOWN_S)
        self._limit_s = float(given) if given else None
        self._longest_s = 0.0
        self._is_told = False

    def start(self) -> Callable[[Future[Any] | None], None]:
        """Time a save that starts now; call what is returned with its writer, if it has one."""
        started = time.monotonic()

        def end(_: object = None) -> None:
            self._longest_s = max(self._longest_s, time.monotonic() - started)

        def follow(writer: Future[Any] | None) -> None:
            # A thread may write on while the training goes on, and its time counts too.
            if writer is None:
                end()
            else:
                writer.add_done_callback(end)

        return follow

    def find_note(self) -> str | None:
        """The note, once, if a save has taken too large a part of the time after SIGTERM."""
        limit_s = self._limit_s
        if limit_s is None or self._is_told or self._longest_s <= FRACTION * limit_s:
            return None
        self._is_told = True
        return (
            f"{NOTE} {self._longest_s:.0f} s to save, and after SIGTERM there are {limit_s:.0f} s; "
            f"raise {option('shutdown_s')}, and with it the grace period of the cluster"
        )
