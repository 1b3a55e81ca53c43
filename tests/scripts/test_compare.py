"""Two real runs side by side, by the command."""

import json
from pathlib import Path

import pytest

from project.predicted import MAX_PICTURES
from tests.conftest import QUICK, run


def test_two_runs_are_compared_in_numbers_and_pictures(digits_run: Path, tmp_path: Path):
    words = [*QUICK, "model=mlp", f"run_root={tmp_path}"]
    assert run("train.py", *words, RUN_ID="mlp").returncode == 0
    page = tmp_path / "compare.html"
    words = [str(digits_run), str(tmp_path / "mlp"), "--json", "--html", str(page)]
    result = run("scripts/compare.py", *words)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert "model.net._target_" in found["configuration"]
    assert found["costs"]["steps"] == ["40", "40"]
    assert all(float(seconds) > 0 for seconds in found["costs"]["seconds of training"])
    accuracies = [cell["value"]["mean"] for cell in found["figures"]["test/accuracy"]]
    words = page.read_text().partition(" of 360 test images: ")[2].split()
    now_right, now_wrong = int(words[0]), int(words[words.index("only", 6) - 1])
    gained = 360 * (accuracies[1] - accuracies[0])
    assert now_right - now_wrong == pytest.approx(gained, abs=1e-3)
    assert page.read_text().count("<img ") == MAX_PICTURES < now_right + now_wrong


def test_wrong_usage_is_one_message(tmp_path: Path):
    result = run("-m", "samestep", "compare", str(tmp_path / "nothing-*"))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "there is no run" in result.stderr
