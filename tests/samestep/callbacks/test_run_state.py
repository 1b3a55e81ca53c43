"""What the state file says while a run trains, and why it ended."""

import signal
from pathlib import Path

import lightning as L
import pytest

from samestep.callbacks.run_state import RunState
from samestep.errors import RunError
from samestep.ranks.stopping import Stopped
from samestep.run import state
from tests.samestep.callbacks.tiny import Tiny, fit


class Raise(L.Callback):
    """Raises in the second epoch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 6:
            raise self.error


def test_each_epoch_writes_how_far_the_run_is(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    fit(tmp_path, Tiny([0.25, 0.75, 0.5]), RunState(str(tmp_path)))
    status = state.read(tmp_path)
    assert status.state == state.STOPPED  # nobody holds the lock of this directory
    assert status[1:-1] == (state.KILLED, "val/score", 0.75, 3, 12)
    assert state.read_ends(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "ended", "why"),
    [
        (Stopped(signal.SIGTERM), state.STOPPED, "SIGTERM"),
        (KeyboardInterrupt(), state.STOPPED, "KeyboardInterrupt"),
        (RunError("the disk is gone"), state.FAILED, "the disk is gone"),
        (KeyError("x"), state.FAILED, "KeyError: 'x'"),
        (ValueError("http://me:hunter2@host " + 600 * "y"), state.FAILED, "ValueError: http://"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_reason_of_an_end_is_kept(tmp_path: Path, error: BaseException, ended: str, why: str):
    (tmp_path / "logs").mkdir()
    with pytest.raises((type(error), SystemExit)):
        fit(tmp_path, Tiny([0.25]), RunState(str(tmp_path)), Raise(error))
    status = state.read(tmp_path)
    assert status.state == ended
    assert status.why.startswith(why)
    assert "hunter2" not in status.why
    assert len(status.why) <= state.MAX_WHY
    assert (status.best, status.epoch, status.step) == (0.25, 1, 6)
    (end,) = state.read_ends(tmp_path)
    assert (end["state"], end["why"], end["step"]) == (ended, status.why, 6)


def test_a_state_that_cannot_be_written_ends_nothing(tmp_path: Path):
    fit(tmp_path, Tiny([0.25]), RunState(str(tmp_path)))  # there is no folder logs
    assert not (tmp_path / state.STATE).exists()
