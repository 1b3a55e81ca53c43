import json
import os
from pathlib import Path

import pytest

from samestep.run import lock, record


def test_facts_that_are_not_given_stay(tmp_path: Path):
    record.update(tmp_path, record.RUNNING, run_id="mine", epoch=1, best=0.5)
    record.update(tmp_path, record.RUNNING, epoch=2)
    known = record.read(tmp_path)
    assert (known.run_id, known.epoch, known.best) == ("mine", 2, 0.5)


def test_people_read_the_state_first(tmp_path: Path):
    record.update(tmp_path, record.RUNNING, starts=[{"command": ["a.py"]}], run_id="mine", step=3)
    lines = (tmp_path / "run.json").read_text().splitlines()
    assert lines[:3] == ["{", '  "run_id": "mine",', '  "state": "running",']
    assert lines.index('  "starts": [') > lines.index('  "step": 3,')


def test_each_end_is_kept_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAKE_TOKEN", "sesame-open-123")
    record.update(tmp_path, record.STOPPED, "SIGTERM", step=7)
    record.update(tmp_path, record.RUNNING, step=8)
    record.update(tmp_path, record.FAILED, f"{tmp_path}/x: sesame-open-123 {600 * 'y'}")
    first, second = record.read(tmp_path).ends
    assert (first["state"], first["why"], first["step"]) == ("stopped", "SIGTERM", 7)
    assert second["why"].startswith("x: *** y")
    assert len(second["why"]) == record.MAX_WHY


def test_a_run_without_a_lock_was_killed(tmp_path: Path):
    record.update(tmp_path, record.RUNNING)
    assert record.read(tmp_path)[1:3] == (record.STOPPED, record.KILLED)
    lock.acquire(tmp_path)
    assert record.read(tmp_path).state == record.RUNNING


def test_without_a_record_the_results_tell_the_state(tmp_path: Path):
    assert record.read(tmp_path).state == record.STOPPED
    (tmp_path / "metrics.json").write_text("{}")
    assert record.read(tmp_path).state == record.FINISHED


@pytest.mark.parametrize("content", ["", "null", "\udc80", "folder", "fifo"])
def test_a_damaged_record_is_kept_aside(tmp_path: Path, content: str, caplog):
    path = tmp_path / "run.json"
    match content:
        case "folder":
            path.mkdir()
        case "fifo":  # a reader would wait for ever
            os.mkfifo(path)
        case _:
            path.write_bytes(content.encode(errors="surrogateescape"))
    assert record.read(tmp_path).starts == []
    record.update(tmp_path, record.STOPPED, "SIGTERM")
    assert "run.json cannot be read" in caplog.text
    assert (tmp_path / "run.json.damaged").exists()
    assert json.loads(path.read_text())["why"] == "SIGTERM"


def test_a_value_of_a_wrong_kind_counts_as_not_known(tmp_path: Path):
    content = {"state": 3, "ends": 1, "starts": [1], "best": "x", "limits": []}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert record.read(tmp_path) == record.Record(
        state=record.STOPPED, why=record.KILLED, repeats=[], slow_ranks=[], starts=[], ends=[]
    )


def test_a_full_disk_keeps_the_old_record(tmp_path: Path):
    record.update(tmp_path, record.RUNNING, epoch=1)
    (tmp_path / ".run.json.partial").mkdir()
    with pytest.raises(IsADirectoryError):
        record.update(tmp_path, record.RUNNING, epoch=2)
    record.try_to_update(tmp_path, record.RUNNING, epoch=2)
    assert record.read(tmp_path).epoch == 1
