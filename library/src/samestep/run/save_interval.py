"""How often a run saves: after so many seconds, or as often as saves pay for themselves.

With ``every_s="auto"`` an interval pays for the save before it: saves cost one percent of the time
of training. So a killed run repeats about a hundred times what a save costs. Imports no torch.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from samestep.errors import ConfigError
from samestep.option_names import setting
from samestep.ranks import environment
from samestep.run import phases

AUTO: Literal["auto"] = "auto"
FRACTION = 0.01  # of training time, which saves may cost
SHORTEST_S, LONGEST_S = 2.0, 300.0  # between two saves
SLOW_DISK = 100e6  # bytes a second

Seconds = float | Literal["auto"]


class SaveInterval:
    """Times what training waits for saves, and says when the next one is due.

    Args:
        every_s: seconds between two saves, or ``auto``.

    Raises:
        ConfigError: if ``every_s`` is neither.
    """

    def __init__(self, every_s: Seconds) -> None:
        is_number = isinstance(every_s, int | float) and not isinstance(every_s, bool)
        # Also false for nan.
        is_valid = every_s == AUTO or (is_number and float(every_s) >= 0)
        if not is_valid:
            raise ConfigError(
                f"{setting('save_every_s', every_s)}: must be {AUTO}, or seconds between two saves"
            )
        self.every_s = every_s
        self.waited_s = 0.0
        """Seconds that training has waited for saves, since this process began."""
        self.price_s: float | None = None
        """Seconds that the last save has cost training; None: there was none yet."""
        self.expected_s: float | None = None
        """The same of the first save, which is due before any was measured; None: unknown."""
        self._saved_at = time.monotonic()
        self._spent_s = 0.0  # on the save that is not complete
        self._is_announced = False

    @property
    def seconds(self) -> float:
        """Seconds from the last save to the next."""
        if self.every_s != AUTO:
            return float(self.every_s)
        price_s = self.expected_s if self.price_s is None else self.price_s
        if price_s is None:
            return LONGEST_S
        return min(max(price_s / FRACTION, SHORTEST_S), LONGEST_S)

    def is_due(self, *, is_writing: bool) -> bool:
        """Whether it is time for the next save, where the one before may still be written."""
        # To wait for it would cost more than the save, but given seconds are a promise.
        if is_writing and self.every_s == AUTO:
            return False
        return time.monotonic() - self._saved_at > self.seconds

    @contextmanager
    def training_waits(self) -> Iterator[None]:
        """Count the time of this block: all that training waits for saves is in such blocks.

        Each ends where all ranks meet, so the seconds of rank zero are those of the slowest rank.
        """
        started = time.monotonic()
        try:
            with phases.spend(phases.SAVING):
                yield
        finally:
            waited_s = time.monotonic() - started
            self.waited_s += waited_s
            self._spent_s += waited_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time of this block as the begin of a save; from its end the next one counts."""
        self._spent_s = 0.0
        with self.training_waits():
            yield
        self.start()

    def start(self) -> None:
        """Count the seconds to the next save from now on."""
        self._saved_at = time.monotonic()

    def complete(self, cpu_s: float) -> None:
        """Take the price of the save that is complete.

        Args:
            cpu_s: seconds of a processor that a thread has taken to write it.
        """
        # Where training leaves no processor idle, it loses as much as the thread has taken.
        self.price_s = self._spent_s + cpu_s / environment.cpus_per_rank()

    def expect(self, seconds: float, num_bytes: int) -> None:
        """Estimate the price of the first save of a run.

        Args:
            seconds: that it took to gather what is saved.
            num_bytes: of it.
        """
        # As on a slow disk, because the first save must not cost more than one percent either: a
        # small net is saved after two seconds all the same, and one of 300 MB after 300.
        self.expected_s = seconds + num_bytes / SLOW_DISK

    def facts(self) -> dict[str, Any]:
        """For ``run.json``. The next start expects this price."""
        if self.every_s != AUTO or self.price_s is None:
            return {}
        return {
            "save_every_s": float(f"{self.seconds:.3g}"),
            "save_price_s": float(f"{self.price_s:.3g}"),
        }

    def find_announcement(self) -> str | None:
        """A line about the chosen interval, once, when the first price is known."""
        if self.every_s != AUTO or self._is_announced:
            return None
        self._is_announced = True
        return (
            f"Saving every {self.seconds:.3g} s ({setting('save_every_s', AUTO)}): a save costs "
            f"{self.price_s:.3g} s of training"
        )
