"""How long a run takes yet, by the pace of its steps so far."""

import math
import time


class StepPace:
    """Estimates the time that is left from the steps since a first one."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # its time, and the steps of before

    def start(self, step: int) -> None:
        """Count from now on, when the run has taken ``step`` steps."""
        self._first = time.perf_counter(), step

    def seconds_left(self, step: int, num_steps: float) -> float | None:
        """The seconds until ``num_steps``; None if they are not known. The first call may start.

        Args:
            step: how many steps the run has taken.
            num_steps: how many it will have taken; infinite if that is not known.
        """
        if self._first is None:
            self.start(step)
        assert self._first is not None
        began, first_step = self._first
        if not first_step < step <= num_steps < math.inf:
            return None
        return (time.perf_counter() - began) / (step - first_step) * (num_steps - step)
