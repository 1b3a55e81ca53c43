"""docs/tasks.md, typed: a table and masks are trained, predicted and exported as printed."""

import csv
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.clone import clone_working_tree
from tests.conftest import ROOT
from tests.printed_commands import find_lines, make_quick, type_line

pytestmark = pytest.mark.nightly

PAGE = ROOT / "docs/tasks.md"
LINES = [line for block in find_lines(PAGE) for line, _ in block]
QUICK = """\
# @package _global_
trainer: {max_epochs: 5, accelerator: cpu}
"""


def write_files(project: Path) -> None:
    """The files of the page, and the tables that its first two lines make."""
    files = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
    assert len(files) == 6
    for name, text in files.items():
        (project / name).write_text(text)
    for line in LINES[:2]:
        assert type_line(line, project).returncode == 0


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = clone_working_tree(tmp_path_factory.mktemp("tasks") / "project")
    write_files(project)
    make_quick(project, QUICK)
    return project


def execute(clone: Path, line: str) -> str:
    done = type_line(line, clone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_table_is_trained_predicted_and_exported(clone: Path):
    train, predict, export = LINES[2:5]
    said = execute(clone, train)
    assert re.search(r"^epoch 5/5  .*train_loss \d.*val_loss \d.* samples/s$", said, re.M), said
    summary = r"^  test_loss +\d+\.\d+\n  test_mae +\d+\.\d+\n  val_loss +\d"
    assert re.search(summary, said, re.M), said
    assert "images" not in said
    assert execute(clone, predict) == ""
    with (clone / "prices.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert [*rows[0]] == ["price"]
    lines = execute(clone, export).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "model.safetensors", "model.pt2", "model.onnx",
    ]  # fmt: skip
    with (clone / "runs/houses/metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in table) >= 5
    assert {row["lr"] for row in table} == {"0.01", ""}


def test_masks_are_shown_in_the_report(clone: Path):
    said = execute(clone, LINES[5])
    last = r"^epoch 5/5  .*train_loss \d.*train_iou \d.*val_loss \d.*val_iou \d"
    assert re.search(last, said, re.M), said
    assert re.search(r"^  test_iou +0\.\d+\n  test_loss +\d.*\n  val_iou", said, re.M), said
    with Image.open(clone / "runs/discs/predictions/0.png") as picture:
        assert picture.mode == "RGB"
    assert "data:image/png;base64" in (clone / "runs/discs/report.html").read_text()
