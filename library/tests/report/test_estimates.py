"""Intervals of means."""

import statistics

import pytest

from samestep.report.estimates import estimate_mean, quantiles


def test_the_quantiles_of_a_page_give_the_intervals_of_the_server():
    values = [0.5, 0.75, 0.625, 1.0]
    known = quantiles(len(values))
    for n in range(2, len(values) + 1):
        half = known[n] * statistics.stdev(values[:n]) / n**0.5
        estimate = estimate_mean({str(seed): values[seed] for seed in range(n)})
        assert estimate.interval95 == pytest.approx(half, rel=1e-4)
