"""The list of all runs."""

import io
import json
import re
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from library.tests.report.fake import make_run
from samestep.plugins import time_file
from samestep.report import listing, wall_time
from samestep.run import record

Printed = io.StringIO


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def listed(folder: Path, *words: str) -> list[str]:
    with redirect_stdout(Printed()) as printed:
        assert listing.main([str(folder), *words]) == 0
    return printed.getvalue().splitlines()


def test_each_run_has_a_line(tmp_path: Path):
    make_run(tmp_path / "done")
    record.update(make_run(tmp_path / "bad"), record.FAILED, "no space left on " + 20 * "xxx ")
    evicted = make_run(tmp_path / "evicted")
    record.update(evicted, record.STOPPED, "SIGTERM", best=None, tags=["first", "try"])
    record.update(make_run(tmp_path / "killed"), record.RUNNING)
    pruned = f"{record.PRUNED} after validation 3"
    record.update(make_run(tmp_path / "trial"), record.STOPPED, pruned)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "multirun.yaml").touch()
    heading, *lines = listed(tmp_path)
    assert heading.split() == ["run", "state", "best", "epochs", "tags", "seen"]
    lines = {line.split()[0]: line for line in lines}
    assert lines.keys() == {"done", "bad", "evicted", "killed", "trial"}
    assert "finished  " in lines["done"]
    assert "0.7000 val/score  3 " in lines["done"]
    assert "failed: no space left on xxx" in lines["bad"]
    assert "...  " in lines["bad"]
    assert "stopped: SIGTERM" in lines["evicted"]
    assert "  first try  " in lines["evicted"]
    assert "val/score" not in lines["evicted"]
    assert "stopped: killed, or its machine was lost" in lines["killed"]
    assert "  pruned after validation 3  " in lines["trial"]
    assert "stopped" not in lines["trial"]
    for line in lines.values():
        assert time.strftime("  %Y-%m-%d %H:") in line
        assert re.search(r" \d\d:\d\d:\d\d[+-]\d\d:\d\d$", line), "with its time zone"
    found = {run["name"]: run for run in json.loads("".join(listed(tmp_path, "--json")))}
    assert found["evicted"]["tags"] == ["first", "try"]
    assert found["done"]["starts"][-1]["hostname"] == "node"


def test_a_terminal_gets_lines_that_fit(tmp_path: Path, monkeypatch):
    name = "digits-cnn-3f2a1b"
    record.update(
        make_run(tmp_path / name), record.FAILED, "no space left on device", tags=["first", "try"]
    )
    whole = listed(tmp_path)
    assert max(map(len, whole)) > 100
    monkeypatch.setattr(f"{__name__}.Printed", Terminal)
    for columns in (100, 80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        heading, line = listed(tmp_path)
        assert len(heading) <= columns
        assert len(line) <= columns
        assert line.startswith(f"{name}  failed")
        assert time.strftime("%Y-%m-%d %H:") in line
        assert "0.7000" in line
    monkeypatch.setenv("COLUMNS", "40")
    heading, line = listed(tmp_path)
    assert len(line) <= 40
    assert line.startswith("digits-...  failed    0.7...  20")
    monkeypatch.setenv("COLUMNS", "300")
    assert listed(tmp_path) == whole


def test_the_account_of_time_fits_a_terminal(tmp_path: Path, monkeypatch):
    make_run(tmp_path / "digits-cnn-3f2a1b")
    start = time_file.Start(0, 0, 0, 9, "cpu", 1, {"start": 15, "training": 45})
    monkeypatch.setattr(wall_time, "read_starts", lambda *_: [start])
    monkeypatch.setattr(f"{__name__}.Printed", Terminal)
    monkeypatch.setenv("COLUMNS", "60")
    assert listed(tmp_path, "--time") == [
        "run                seconds  goodput  percent of the seconds",
        "digits-cnn-3f2a1b  60       75.0 %   training 75.0, start...",
        "all                60       75.0 %   training 75.0, start...",
    ]
    monkeypatch.setenv("COLUMNS", "200")
    assert "  validation  saving  " in listed(tmp_path, "--time")[0]


def test_the_newest_runs_come_first(tmp_path: Path):
    for name, hour in (("old", 1), ("new", 3), ("middle", 2)):
        text = f'{{"state": "finished", "time": "2026-11-22T0{hour}:00:00+00:00"}}'
        (make_run(tmp_path / name) / record.FILE).write_text(text)
    (make_run(tmp_path / "damaged") / record.FILE).unlink()
    runs = listing.list_runs(tmp_path)
    assert list(runs) == ["new", "middle", "old", "damaged"]
    assert runs["damaged"].state == "finished"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"state": 3}', '{"ends": 1}', '{"time": 5}'])
def test_a_damaged_state_is_no_obstacle(tmp_path: Path, content: str):
    run_dir = make_run(tmp_path / "one")
    (run_dir / record.FILE).write_text(content)
    assert len(listed(tmp_path)) == 2
    record.update(run_dir, record.FINISHED)
    assert len(record.read(run_dir).ends) == 1
