"""How long saves take, against the time that a cluster gives a run to save.

A run that saves too slowly for its grace period works until the first eviction, and loses then what
it has trained since the last save. So it says so while there is time.
"""

import time
from concurrent.futures import Future
from typing import Any

import lightning as L

from samestep.callbacks.notes import print_note
from samestep.option_names import option
from samestep.plugin import Plugin
from samestep.ranks import environment
from samestep.run_spec import RunSpec

NOTE = "Note: a checkpoint takes"
"""How the note begins; ``samestep status`` looks for it, and imports no torch."""
FRACTION = 0.5  # of the time after SIGTERM: a step, an epoch's end or a busy disk come on top


def callback(spec: RunSpec) -> L.Callback | None:
    """``SaveTime``, where a cluster says how long a run may take to save."""
    limit_s = environment.variable(environment.SHUTDOWN_S)
    return SaveTime(float(limit_s)) if limit_s else None


class SaveTime(Plugin):
    """Notes, once, that a save has taken too large a part of the time after SIGTERM.

    Args:
        limit_s: seconds after SIGTERM.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._has_told = False

    def on_saved(self, trainer: Any, began: float, writer: Future[Any] | None) -> None:
        """Take the time of the save, when it is written."""

        def end(_: object = None) -> None:
            seconds = time.monotonic() - began
            if self._has_told or seconds <= FRACTION * self.limit_s:
                return
            self._has_told = True
            print_note(
                trainer,
                f"{NOTE} {seconds:.0f} s to save, and after SIGTERM there are {self.limit_s:.0f} "
                f"s; raise {option('shutdown_s')}, and with it the grace period of the cluster",
            )

        # A thread may write on while the training goes on, and its time counts too.
        if writer is None:
            end()
        else:
            writer.add_done_callback(end)
