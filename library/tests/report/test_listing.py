"""The list of all runs."""

import time
from pathlib import Path

import pytest

from library.tests.report.fake import make_run
from samestep.report import listing
from samestep.run import record


def listed(folder: Path) -> list[str]:
    return listing.to_lines(listing.list_runs(folder), time.time())


def test_each_run_has_a_line(tmp_path: Path):
    make_run(tmp_path / "done")
    record.update(make_run(tmp_path / "bad"), record.FAILED, "no space left on " + 80 * "x")
    record.update(make_run(tmp_path / "evicted"), record.STOPPED, "SIGTERM", best=None)
    killed = make_run(tmp_path / "killed")
    record.update(killed, record.RUNNING)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "multirun.yaml").touch()
    lines = {line.split()[0]: line for line in listed(tmp_path)}
    assert lines.keys() == {"run", "done", "bad", "evicted", "killed"}
    assert "finished  " in lines["done"]
    assert "0.7 val/score  3 " in lines["done"]
    assert "failed: no space left on xxx" in lines["bad"]
    assert "stopped: SIGTERM" in lines["evicted"]
    assert "val/score" not in lines["evicted"]
    assert "stopped: killed, or its machine was lost" in lines["killed"]
    assert all(line.endswith(" s ago") for name, line in lines.items() if name != "run")


def test_tags_have_a_column_if_a_run_has_some(tmp_path: Path):
    run_dir = make_run(tmp_path / "one")
    assert listed(tmp_path)[0].split() == ["run", "state", "best", "epochs", "seen"]
    record.update(run_dir, record.FINISHED, tags=["first", "try"])
    heading, line = listed(tmp_path)
    assert heading.split()[-2:] == ["tags", "seen"]
    assert "  first try  " in line
    (found,) = listing.to_json(listing.list_runs(tmp_path))
    assert found["tags"] == ["first", "try"]


def test_the_newest_runs_come_first(tmp_path: Path):
    for name, hour in (("old", 1), ("new", 3), ("middle", 2)):
        run_dir = make_run(tmp_path / name)
        text = f'{{"state": "finished", "time": "2026-11-22T0{hour}:00:00+00:00"}}'
        (run_dir / record.FILE).write_text(text)
    (make_run(tmp_path / "lost") / record.FILE).unlink()  # counts as seen now
    runs = listing.list_runs(tmp_path)
    assert [run.name for run in runs] == ["lost", "new", "middle", "old"]
    assert runs[0].status.state == "finished"
    assert [listing.age(s) for s in (-1, 59, 60, 7200, 86400 * 8)] == [
        "0 s", "59 s", "1 min", "2 h", "8 days",
    ]  # fmt: skip
    lines = listing.to_lines(runs[1:], runs[1].seen + 3600)
    assert lines[1].endswith("1 h ago")
    assert runs[0].seen == pytest.approx(time.time(), abs=600)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"state": 3}', '{"ends": 1}', '{"time": 5}'])
def test_a_damaged_state_is_no_obstacle(tmp_path: Path, content: str):
    run_dir = make_run(tmp_path / "one")
    (run_dir / record.FILE).write_text(content)
    assert len(listed(tmp_path)) == 2
    record.update(run_dir, record.FINISHED)
    assert len(record.read(run_dir).ends) == 1
