"""``samestep verify`` of train.py: Hydra's front end has a way of its own to start ranks."""

import json
import sys
from pathlib import Path

import pytest

from samestep.verify.main import main
from tests.conftest import NO_PICTURES, ROOT, environment

pytestmark = pytest.mark.program


def test_the_template_is_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "configs", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Where the command has its runs, and how many ranks, does not matter.
    elsewhere = [f"run_root={tmp_path}/elsewhere", "trainer.devices=3", "trainer.max_epochs=50"]
    command = [sys.executable, "train.py", "model=mlp", NO_PICTURES, *elsewhere]
    code = main(["--steps=6", "--json", "--only=SIGTERM", "--only=2 ranks", "--", *command])
    table = json.loads(capsys.readouterr().out)
    results = {name: line["result"] for name, line in table.items()}
    assert (code, results) == (0, {"SIGTERM": "identical", "2 ranks": "identical"}), table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "src", "train.py"]
