"""Training from a notebook, and from a debugger."""

import json
import re
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from project.train import train
from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.main import train_in_process
from tests.conftest import NO_PICTURES, ROOT


@pytest.mark.program
def test_a_notebook_trains_and_gets_the_metrics_of_a_finished_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The cell of docs/use.md, twice, in a real kernel; the second time nothing is trained."""
    nbformat = pytest.importorskip("nbformat", reason="nbconvert is not installed")
    preprocessors = pytest.importorskip("nbconvert.preprocessors")
    page = (ROOT / "docs/use.md").read_text()
    (cell,) = re.findall(r"```python\n(from project\.train .*?)```", page, re.S)
    cell = cell.replace("])", f', "report=false", "{NO_PICTURES}", "run_root={tmp_path}"])')
    cells = ["import signal; before = signal.getsignal(signal.SIGTERM)", cell,
             "first = metrics; assert signal.getsignal(signal.SIGTERM) is before", cell,
             "assert metrics == first and len(first) > 2, metrics",
             "print(sorted(first))"]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'library/src'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the fork server has it
    run = preprocessors.ExecutePreprocessor(timeout=PATIENCE_S, kernel_name="python3")
    run.preprocess(notebook, {"metadata": {"path": str(ROOT)}})
    said = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert "epoch 2/2" in said[1]
    assert "Nothing to do, the run in" in said[3]
    assert "epoch 2/2" not in said[3]
    metrics = json.loads((tmp_path / "mine/metrics.json").read_text())
    assert str(sorted(metrics)) in said[5]


def test_several_processes_need_a_terminal():
    with pytest.raises(ConfigError, match="several processes need a terminal"):
        train_in_process(train, ["trainer.devices=2", "trainer.accelerator=cpu"])


def test_the_debugger_starts_what_exists():
    settings = json.loads((ROOT / ".vscode/launch.json").read_text())
    train, tests = settings["configurations"]
    assert (ROOT / train["program"].removeprefix("${workspaceFolder}/")).exists()
    assert check(train["args"]).trainer.fast_dev_run
    assert tests["module"] == "pytest"
