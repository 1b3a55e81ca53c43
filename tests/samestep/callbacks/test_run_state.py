"""What the state file says while a run trains."""

from pathlib import Path
from typing import Any

import pytest

from samestep.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from samestep.callbacks.run_state import RunState
from samestep.run import directory, state, summary
from samestep.run.checkpoint import CheckpointError
from tests.samestep.callbacks import tiny
from tests.samestep.callbacks.tiny import Tiny, fit


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_each_epoch_writes_how_far_the_run_is(run_dir: Path):
    fit(run_dir, Tiny([0.25, 0.75, 0.5]), RunState(str(run_dir)))
    status = state.read(run_dir)
    assert status.state == state.STOPPED  # nobody holds the lock of this directory
    assert status[1:-1] == (state.KILLED, "val/score", 0.75, 2, 3, 12)
    assert state.read_ends(run_dir) == []


def test_a_state_that_cannot_be_written_ends_nothing(tmp_path: Path):
    fit(tmp_path, Tiny([0.25]), RunState(str(tmp_path)))  # there is no folder logs
    assert not (tmp_path / state.STATE).exists()


def test_the_best_value_of_a_training_metric_is_that_of_the_epoch_that_has_ended(run_dir: Path):
    class OfTraining(Tiny):
        def on_validation_epoch_end(self):
            pass

        def on_train_epoch_end(self):
            self.log("val/score", float(self.current_epoch))

    fit(run_dir, OfTraining(), RunState(str(run_dir)), max_epochs=2)
    assert state.read(run_dir)[2:-1] == ("val/score", 1.0, 2, 2, 8)


def lose_best(run_dir: Path) -> None:
    """Remove the best weights under each of their names."""
    for name in ("best", "last-previous"):
        (run_dir / f"checkpoints/{name}.ckpt").unlink()


def test_the_value_of_weights_that_are_gone_is_forgotten(run_dir: Path):
    fit(run_dir, Tiny([0.25, 0.75, 0.5]), RunState(str(run_dir)))
    lose_best(run_dir)
    seen = []

    class Watch(Tiny):
        def on_train_batch_start(self, *_: Any):
            seen.append(state.read(run_dir))

    fit(run_dir, Watch([0, 0, 0, 0.1, 0.5]), RunState(str(run_dir)), max_epochs=5, ckpt="last.ckpt")
    assert seen[0][2:-1] == ("val/score", None, None, 3, 12)
    assert state.read(run_dir)[2:-1] == ("val/score", 0.5, 5, 5, 20)
    assert summary.best_epoch(state.read(run_dir)) == {"val/score": "0.5000 in epoch 5"}


class KeepBest(BestCheckpoint):
    """Of a user, who has changed a little."""


class KeepLast(LastCheckpoint):
    """Of a user, who has changed a little."""


def test_subclasses_are_found_as_their_parents_are(run_dir: Path, monkeypatch):
    monkeypatch.setattr(tiny, "BestCheckpoint", KeepBest)
    monkeypatch.setattr(tiny, "LastCheckpoint", KeepLast)
    fit(run_dir, Tiny([0.25, 0.75, 0.5]), RunState(str(run_dir)))
    assert state.read(run_dir).best == 0.75
    lose_best(run_dir)
    # Its last weights must not be tested in place of the best ones.
    with pytest.raises(CheckpointError, match=r"it is missing, or damaged, and the best .* step 8"):
        directory.best_checkpoint(run_dir)
