"""Means of repeated runs and differences between them, with confidence intervals."""

import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestep.report.files import show

CONFIDENCE = 0.95

BySeed = Mapping[str, float]
"""A metric of runs that repeat each other, by the seed of each run."""


class Estimate(NamedTuple):
    """A mean, or the difference between two means."""

    mean: float
    interval95: float | None  # half of the 95 % confidence interval; None for single values
    n: int  # values in the smaller of the two groups
    paired: bool  # whether runs of the same seeds were compared, seed by seed

    def text(self, *, is_difference: bool = False) -> str:
        """The mean with its interval, as in a table; a positive difference has a plus sign."""
        text = show(self.mean)
        if is_difference and self.mean > 0:
            text = f"+{text}"
        if self.interval95 is not None:
            # Two places of an interval are enough; but from 100 on, `.2g` would write 1.2e+02.
            half = show(self.interval95) if self.interval95 >= 100 else f"{self.interval95:.2g}"
            text += f" ± {half}"
        return f"{text} paired" if self.paired else text


def estimate_mean(values: BySeed) -> Estimate | None:
    """The mean of repeats, with its interval by Student's t; None without a value."""
    if not values:
        return None
    numbers = list(values.values())
    return Estimate(statistics.fmean(numbers), half_width(numbers), len(numbers), paired=False)


def estimate_difference(values: BySeed, base: BySeed) -> Estimate | None:
    """The mean of repeats minus that of a base; None if one of them has no value.

    The interval is Student's t over the differences of each seed if both have the same seeds, and
    Welch's t otherwise.
    """
    if not values or not base:
        return None
    # Equal seeds share their initial weights and order, so that noise cancels in the difference,
    # and the interval is often many times shorter.
    if len(values) > 1 and values.keys() == base.keys():
        gaps = [values[seed] - base[seed] for seed in values]
        return Estimate(statistics.fmean(gaps), half_width(gaps), len(gaps), paired=True)
    own = list(values.values())
    other = list(base.values())
    mean = statistics.fmean(own) - statistics.fmean(other)
    return Estimate(mean, half_width_welch(own, other), min(len(own), len(other)), paired=False)


def half_width(numbers: Sequence[float]) -> float | None:
    """Half of the confidence interval of a mean; None if a single value tells nothing of it."""
    if len(numbers) < 2:
        return None
    # The import takes a second, and runs without repeats do not need it.
    from scipy import stats  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        # scipy warns of equal values; their interval is 0, which is the right answer.
        warnings.simplefilter("ignore")
        low, high = stats.ttest_1samp(numbers, 0).confidence_interval(CONFIDENCE)
    return float(high - low) / 2


def quantiles(largest: int) -> list[float]:
    """What a page needs for intervals of its own: Student's t, by the number of values."""
    from scipy import stats

    known = stats.t.ppf((1 + CONFIDENCE) / 2, range(1, largest))
    # A mean of no value or of one has no interval.
    return [0.0, 0.0, *known.round(5).tolist()]


def half_width_welch(own: Sequence[float], other: Sequence[float]) -> float | None:
    """Half of the confidence interval of a difference; None if one mean has a single value."""
    if min(len(own), len(other)) < 2:
        return None
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Not the t-test with a common variance: a change can make a model less stable too.
        welch = stats.ttest_ind(own, other, equal_var=False)
        low, high = welch.confidence_interval(CONFIDENCE)
    return float(high - low) / 2
