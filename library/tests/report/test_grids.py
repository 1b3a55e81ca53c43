"""Grids in the list of runs, and their tables."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from library.tests.report.fake import make_run
from samestep.errors import ConfigError
from samestep.grid import jobs
from samestep.report import listing
from samestep.run import record


def shown(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        assert listing.main([*words]) == 0
    return printed.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two learning rates with two seeds each, of which one run was killed and one has not begun."""
    grid = []
    for lr, seed, score in (("0.1", 0, 0.5), ("0.1", 1, 0.7), ("0.2", 0, 0.9)):
        name = f"mine-lr-{lr}-seed-{seed}"
        values = {"model.lr": lr, "seed": str(seed)}
        grid.append(jobs.Job(name, make_run(tmp_path / name, score=score), [], values, str))
    record.update(tmp_path / "mine-lr-0.2-seed-0", record.RUNNING)
    grid.append(jobs.Job("mine-bad", tmp_path / "mine-bad", [], {"model.lr": "x"}, str))
    folder = tmp_path / "grids/mine"
    folder.mkdir(parents=True)
    jobs.write_jobs(folder, grid)
    jobs.write_outcome(folder, grid[-1], 2, "model.lr=x: must be a number")
    make_run(tmp_path / "other")
    return tmp_path


def test_a_grid_is_one_line_of_the_list(root: Path):
    _, *lines = shown(str(root)).splitlines()
    names = sorted(line.split("  ")[0] for line in lines)
    assert names == ["mine (grid)", "other"]
    (line,) = (line for line in lines if line.startswith("mine"))
    assert " 2 of 4 finished, 1 failed, 1 stopped  0.7000 val/score " in line
    assert len(json.loads(shown(str(root), "--json"))) == 4


def test_its_table_has_means_over_the_seeds(root: Path):
    found = json.loads(shown(str(root), "--grid", "mine", "--json"))
    assert len(found["runs"]) == 3
    first, second, third = found["values"]
    assert first["model.lr"] == "0.1"
    assert first["runs"] == "2"
    assert first["test/score"]["mean"] == pytest.approx(0.6)
    assert first["test/score"]["interval95"] == pytest.approx(1.27, abs=0.01)
    assert first["val/score"]["mean"] == pytest.approx(0.7)
    assert second["runs"] == "0 of 1"
    assert second["test/score"] == third["test/score"] == ""
    text = shown(str(root), "--grid", "mine")
    assert "mine-lr-0.1-seed-1  finished" in text
    assert "0.6000 ± 1.3" in text
    assert text.index("test/score") < text.index("time/total_s")


def test_a_grid_that_is_not_there_names_those_that_are(root: Path):
    with pytest.raises(ConfigError, match="has no such grid with a run; it has mine"):
        listing.main([str(root), "--grid", "their"])


def test_damaged_files_of_a_grid_are_no_obstacle(root: Path):
    (root / "grids/mine/jobs.json").write_text('{"mine-lr-0.1-seed-0": 3')
    assert "mine-lr-0.1-seed-0" in shown(str(root))
