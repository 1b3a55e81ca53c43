"""What the state file says while a run trains."""

from pathlib import Path

from samestep.callbacks.run_state import RunState
from samestep.run import state
from tests.samestep.callbacks.tiny import Tiny, fit


def test_each_epoch_writes_how_far_the_run_is(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    fit(tmp_path, Tiny([0.25, 0.75, 0.5]), RunState(str(tmp_path)))
    status = state.read(tmp_path)
    assert status.state == state.STOPPED  # nobody holds the lock of this directory
    assert status[1:-1] == (state.KILLED, "val/score", 0.75, 3, 12)
    assert state.read_ends(tmp_path) == []


def test_a_state_that_cannot_be_written_ends_nothing(tmp_path: Path):
    fit(tmp_path, Tiny([0.25]), RunState(str(tmp_path)))  # there is no folder logs
    assert not (tmp_path / state.STATE).exists()
