"""What ``run.json`` says while a run trains."""

from pathlib import Path
from typing import Any

import pytest

from library.tests.callbacks import tiny
from library.tests.callbacks.tiny import Tiny, fit
from samestep.callbacks.checkpoints import Checkpoints
from samestep.callbacks.slice_weighting import SliceWeighting
from samestep.report import summary
from samestep.report.files import read_run
from samestep.run import lifecycle, record
from samestep.run.checkpoint import CheckpointError


def progress(run_dir: Path) -> tuple[Any, ...]:
    known = record.read(run_dir)
    return known.monitor, known.best, known.best_epoch, known.epoch, known.step


def test_each_epoch_records_the_progress(tmp_path: Path):
    fit(tmp_path, Tiny([0.25, 0.75, 0.5]))
    known = record.read(tmp_path)
    assert (known.state, known.why) == (record.STOPPED, record.KILLED)  # nobody holds the lock
    assert progress(tmp_path) == ("val/score", 0.75, 2, 3, 12)
    assert known.ends == []


def test_training_continues_if_the_record_cannot_be_written(tmp_path: Path):
    (tmp_path / ".run.json.partial").mkdir()
    fit(tmp_path, Tiny([0.25]))
    assert not (tmp_path / record.FILE).exists()


def test_measured_shares_are_recorded(tmp_path: Path):
    weighting = SliceWeighting()
    weighting.shares = (0.25, 0.75)
    fit(tmp_path, Tiny([0.5]), weighting, max_epochs=1)
    assert record.read(tmp_path).shares == [0.25, 0.75]


def test_the_best_value_of_a_training_metric_is_that_of_the_epoch_that_has_ended(tmp_path: Path):
    class OfTraining(Tiny):
        def on_validation_epoch_end(self):
            pass

        def on_train_epoch_end(self):
            self.log("val/score", float(self.current_epoch))

    fit(tmp_path, OfTraining(), max_epochs=2)
    assert progress(tmp_path) == ("val/score", 1.0, 2, 2, 8)


def lose_best(tmp_path: Path) -> None:
    """Remove the best weights under each of their names."""
    for name in ("best", "last-previous"):
        (tmp_path / f"checkpoints/{name}.ckpt").unlink()


def test_the_value_of_weights_that_are_gone_is_forgotten(tmp_path: Path):
    fit(tmp_path, Tiny([0.25, 0.75, 0.5]))
    lose_best(tmp_path)
    seen = []

    class Watch(Tiny):
        def on_train_batch_start(self, *_: Any):
            seen.append(progress(tmp_path))

    fit(
        tmp_path,
        Watch([0, 0, 0, 0.1, 0.5]),
        max_epochs=5,
        ckpt="last.ckpt",
    )
    assert seen[0] == ("val/score", None, None, 3, 12)
    assert progress(tmp_path) == ("val/score", 0.5, 5, 5, 20)
    facts = summary.facts_of(read_run(tmp_path))
    assert facts["val/score"] == "0.5000 in epoch 5"


class Keep(Checkpoints):
    """Of a user, who has changed a little."""


def test_a_subclass_is_found_as_its_parent_is(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tiny, "Checkpoints", Keep)
    fit(tmp_path, Tiny([0.25, 0.75, 0.5]))
    assert record.read(tmp_path).best == 0.75
    lose_best(tmp_path)
    # Its last weights must not be tested in place of the best ones.
    with pytest.raises(CheckpointError, match=r"it is missing, or damaged, and the best .* step 8"):
        lifecycle.find_best(tmp_path)
