"""Training from a notebook, and from a debugger."""

import json
import re
from pathlib import Path

import pytest

import project
from library.tests.programs import PATIENCE_S
from samestep.errors import ConfigError
from samestep.hydra.compose import check
from tests.conftest import NO_PICTURES, ROOT


def test_a_notebook_trains_and_gets_the_metrics_of_a_finished_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The cell of docs/use.md, twice, in a real kernel; the second time nothing is trained."""
    nbformat = pytest.importorskip("nbformat", reason="nbconvert is not installed")
    preprocessors = pytest.importorskip("nbconvert.preprocessors")
    cell = 'figures = project.train(["trainer.max_epochs=2", "run_id=mine"])'
    page = ROOT / "docs/use.md"
    if page.exists():  # a copy has no docs
        ((cell,),) = [re.findall(r"^figures = project.train.*", page.read_text(), re.M)]
    cell = cell.replace("])", f', "report=false", "{NO_PICTURES}", "run_root={tmp_path}"])')
    cells = ["import project, signal; before = signal.getsignal(signal.SIGTERM)", cell,
             "first = figures; assert signal.getsignal(signal.SIGTERM) is before", cell,
             "assert figures == first and len(first) > 2, figures",
             "print(sorted(first))"]  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT / 'library/src'}")
    run = preprocessors.ExecutePreprocessor(timeout=PATIENCE_S, kernel_name="python3")
    run.preprocess(notebook, {"metadata": {"path": str(ROOT)}})
    said = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert "epoch 2/2" in said[1]
    assert "Nothing to do, the run in" in said[3]
    assert "epoch 2/2" not in said[3]
    figures = json.loads((tmp_path / "mine/metrics.json").read_text())
    assert str(sorted(figures)) in said[5]


def test_several_processes_need_a_terminal():
    with pytest.raises(ConfigError, match="several processes need a terminal"):
        project.train(["trainer.devices=2", "trainer.accelerator=cpu"])


def test_the_debugger_starts_what_exists():
    settings = json.loads((ROOT / ".vscode/launch.json").read_text())
    train, tests = settings["configurations"]
    assert (ROOT / train["program"].removeprefix("${workspaceFolder}/")).exists()
    assert check(train["args"]).trainer.fast_dev_run
    assert tests["module"] == "pytest"
