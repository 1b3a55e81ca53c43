"""Saves are as often as one percent of training time allows, or as the user says."""

import math
import time

import pytest

from samestep.errors import ConfigError
from samestep.ranks import environment
from samestep.run.save_interval import SaveInterval


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def save(interval: SaveInterval, clock: list[float], *seconds: float) -> None:
    """A save for which training waits twice: for the copy, and to give it its names."""
    first, *others = seconds
    with interval.saving():
        clock[0] += first
    for each in others:
        clock[0] += 1000  # training goes on while it is written, which costs nothing
        with interval.training_waits():
            clock[0] += each
    interval.complete(0)


@pytest.mark.parametrize(
    ("price", "seconds"), [((0.001,), 2), ((0.04, 0.01), 5), ((1, 0.5), 150), ((4,), 300)]
)
def test_an_interval_pays_for_the_save_before_it(clock, price, seconds):
    interval = SaveInterval("auto")
    save(interval, clock, *price)
    assert interval.seconds == pytest.approx(seconds)
    save(interval, clock, 0.03)
    assert interval.seconds == pytest.approx(3)
    for later, is_due in ((2.9, False), (0.2, True)):
        clock[0] += later
        assert interval.is_due(is_writing=False) == is_due
    assert not interval.is_due(is_writing=True)
    given = SaveInterval(5)
    clock[0] += 6
    assert given.is_due(is_writing=True)
    assert interval.waited_s == pytest.approx(sum(price) + 0.03)


def test_the_time_of_the_thread_that_writes_is_a_part_of_the_price(clock, monkeypatch):
    monkeypatch.setattr(environment, "cpus_per_rank", lambda: 4)
    interval = SaveInterval("auto")
    with interval.saving():
        clock[0] += 0.1
    interval.complete(0.4)
    assert interval.seconds == pytest.approx(20)
    assert interval.waited_s == pytest.approx(0.1)


def test_the_first_save_is_priced_as_on_a_slow_disk(clock):
    interval = SaveInterval("auto")
    assert interval.seconds == 300
    assert interval.facts() == {}
    for num_bytes, seconds in ((10**4, 2), (10**7, 11), (10**9, 300)):
        interval.expect(0.01, num_bytes)
        assert interval.seconds == pytest.approx(seconds)
    assert interval.facts() == {}, "nothing was measured"
    save(interval, clock, 0.123456)
    assert interval.facts() == {"save_every_s": 12.3, "save_price_s": 0.123}


def test_the_choice_is_announced_once_and_never_where_the_user_has_chosen(clock):
    interval = SaveInterval("auto")
    save(interval, clock, 0.04)
    text = "Saving every 4 s (save_every_s=auto): a save costs 0.04 s of training"
    assert interval.find_announcement() == text
    save(interval, clock, 9)
    assert interval.find_announcement() is None
    for given in (0, 1e-9, 7, math.inf):
        interval = SaveInterval(given)
        save(interval, clock, 9)
        assert interval.seconds == given
        assert interval.facts() == {}
        assert interval.find_announcement() is None


@pytest.mark.parametrize("value", [-1, math.nan, None, True, "often", "300"])
def test_other_values_are_one_message(value):
    with pytest.raises(ConfigError, match=r"save_every_s=.*: must be auto, or seconds between two"):
        SaveInterval(value)
