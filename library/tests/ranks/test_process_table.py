import os
import signal
import subprocess
from pathlib import Path

import pytest

from samestep.ranks import process_table
from samestep.ranks.process_tree import descendants_of

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
            while len(found := descendants_of(process.pid)) < 1:
                pass
            assert set(found) < set(descendants_of(os.getpid()))
            assert process.pid in descendants_of(os.getpid())
            assert process_table.start_of(process.pid)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_without_ps_nothing_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert process_table.start_of(os.getpid()) is None
    assert descendants_of(os.getpid()) == []
