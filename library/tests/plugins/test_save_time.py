"""A run whose saves take too long for its grace period says so, once."""

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from library.tests.kit import fit, make_spec
from samestep.plugins import save_time
from samestep.ranks import environment

TRAINER = SimpleNamespace(is_global_zero=True)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setenv(environment.SHUTDOWN_S, "90")
    return now


def make() -> save_time.SaveTime:
    return save_time.callback(make_spec(Path("run")))


def test_a_slow_save_is_told_once(clock, capsys):
    times = make()
    for seconds, is_told in ((44, False), (46, True), (80, False)):
        began = clock[0]
        clock[0] += seconds
        times.on_saved(TRAINER, began, None)
        note = capsys.readouterr().out
        assert bool(note) == is_told
        if note:
            assert note.startswith("Note: a checkpoint takes 46 s to save, and after SIGTERM")
            assert "there are 90 s; raise shutdown_s" in note


def test_the_time_of_a_writer_in_the_background_counts(clock, capsys):
    writer = Future()
    make().on_saved(TRAINER, clock[0], writer)
    clock[0] += 60
    assert capsys.readouterr().out == ""  # it still writes
    writer.set_result(None)
    assert "60 s" in capsys.readouterr().out


def test_without_a_limit_nothing_is_told(monkeypatch):
    monkeypatch.delenv(environment.SHUTDOWN_S, raising=False)
    assert make() is None


def test_each_save_of_a_run_is_timed(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv(environment.SHUTDOWN_S, "1e-9")
    fit(tmp_path)
    assert capsys.readouterr().out.count(save_time.NOTE) == 1
