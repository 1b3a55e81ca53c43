import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from samestep.ranks import process_table

pytestmark = pytest.mark.program


@pytest.mark.program
@pytest.mark.parametrize("has_proc", [True, False])
def test_processes_are_found_with_and_without_proc(monkeypatch: pytest.MonkeyPatch, has_proc: bool):
    if not has_proc:
        monkeypatch.setattr(Path, "exists", lambda path: False)
    started = process_table.start_of(os.getpid())
    assert started
    assert process_table.start_of(os.getpid()) == started
    with subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True) as process:
        try:
            while len(found := process_table.descendants_of(process.pid)) < 1:
                pass
            assert set(found) < set(process_table.descendants_of(os.getpid()))
            assert process.pid in process_table.descendants_of(os.getpid())
            assert process_table.start_of(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.program
def test_the_time_of_a_start_is_known(monkeypatch: pytest.MonkeyPatch):
    before = time.time()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        after = time.time()
        try:
            started = process_table.time_of_start(process.pid)
            assert started is not None
            # The system counts in hundredths of a second.
            assert before - 0.02 <= started <= after + 0.02
            monkeypatch.setattr(Path, "exists", lambda path: False)
            started = process_table.time_of_start(process.pid)
            assert started is not None
            # And ps in seconds.
            assert before - 2 <= started <= after + 2
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_without_ps_nothing_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert process_table.start_of(os.getpid()) is None
    assert process_table.descendants_of(os.getpid()) == []
