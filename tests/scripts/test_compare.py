"""Two real runs side by side, by the command."""

import json
from pathlib import Path

from tests.conftest import QUICK, run


def test_two_runs_are_compared_in_numbers_and_curves(digits_run: Path, tmp_path: Path):
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
    assert "<h3>val/loss</h3>" in page.read_text()


def test_wrong_usage_is_one_message(tmp_path: Path):
    result = run("scripts/compare.py", str(tmp_path / "nothing-*"))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "there is no run" in result.stderr
