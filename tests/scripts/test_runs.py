"""The list of runs, by the command."""

import json
from pathlib import Path

import pytest

from tests.conftest import run

pytestmark = pytest.mark.program


def test_all_runs_are_listed_and_an_empty_folder_says_so(digits_run: Path, tmp_path: Path):
    listed = run("-m", "samestep", "runs", str(digits_run.parent), "--json")
    (found,) = json.loads(listed.stdout)
    assert found["state"] == "finished"
    empty = run("-m", "samestep", "runs", str(tmp_path))
    assert (empty.returncode, empty.stdout) == (0, f"There is no run in {tmp_path}.\n")
    missing = run("-m", "samestep", "runs", str(tmp_path / "nothing"))
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
