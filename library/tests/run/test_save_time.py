"""A run whose saves take too long for its grace period says so, once."""

import time
from concurrent.futures import Future

import pytest

from samestep.ranks import environment
from samestep.run import save_time
from samestep.run.save_time import SaveTime


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv(environment.SHUTDOWN_S, "90")
    return now


def test_a_slow_save_is_told_once(clock):
    times = SaveTime()
    for seconds, is_told in ((44, False), (46, True), (80, False)):
        follow = times.start()
        clock[0] += seconds
        follow(None)
        note = times.find_note()
        assert (note is not None) == is_told
        if note:
            assert note.startswith("Note: a checkpoint takes 46 s to save, and after SIGTERM")
            assert "there are 90 s; raise shutdown_s" in note


def test_the_time_of_a_writer_in_the_background_counts(clock):
    times, writer = SaveTime(), Future()
    times.start()(writer)
    clock[0] += 60
    assert times.find_note() is None  # it still writes
    writer.set_result(None)
    assert "60 s" in times.find_note()


def test_without_a_limit_nothing_is_told(clock, monkeypatch):
    monkeypatch.delenv(environment.SHUTDOWN_S)
    times = SaveTime()
    follow = times.start()
    clock[0] += 1000
    follow(None)
    assert times.find_note() is None


def test_the_note_is_the_one_that_status_looks_for():
    assert save_time.NOTE.startswith("Note: ")
