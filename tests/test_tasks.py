"""docs/tasks.md, executed: a table and masks are trained, predicted and exported as printed."""

import csv
import re
import shlex
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import make_regression

from tests.conftest import ROOT, run

PAGE = (ROOT / "docs/tasks.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = "".join(BLOCKS).replace("\\\n", "").splitlines()
QUICK = ["trainer.max_epochs=5", "trainer.accelerator=cpu"]
DISCS = '''
import lightning as L
import torch
from torch.utils.data import TensorDataset

from samestep.data.loader import BatchLoader


class Discs(L.LightningDataModule):
    """Noisy images of bright discs."""

    def setup(self, stage):
        places = torch.rand(300, 2, 1, 1, generator=torch.Generator().manual_seed(0)) * 32
        rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
        masks = ((rows - places[:, :1]) ** 2 + (columns - places[:, 1:]) ** 2 < 40).float()
        self.data = TensorDataset(masks + 0.5 * torch.randn_like(masks), masks)

    def train_dataloader(self):
        return BatchLoader(self.data, 20, shuffle=True, seed=0)

    def val_dataloader(self):
        return BatchLoader(self.data, 100)

    test_dataloader = val_dataloader
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the files of the page, a table of houses, and discs."""
    root = tmp_path_factory.mktemp("tasks") / "project"
    for name in ("src", "configs", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", root)
    files = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
    assert len(files) == 4
    files["src/project/discs.py"] = DISCS
    files["configs/data/discs.yaml"] = "_target_: project.discs.Discs\n"
    files["configs/model/masks.yaml"] = "_target_: project.masks.Masks\nlr: 0.01\n"
    for name, text in files.items():
        (root / name).write_text(text)
    write_houses(root / "houses.csv")
    write_houses(root / "new.csv", rows=7, has_price=False)
    return root


def write_houses(path: Path, rows: int = 500, has_price: bool = True) -> None:
    x, y = make_regression(500, 8, noise=5.0, random_state=0)
    columns = np.column_stack([x, y / 100] if has_price else [x])[:rows]
    header = ",".join([*(f"x{n}" for n in range(8)), "price"][: columns.shape[1]])
    np.savetxt(path, columns, delimiter=",", comments="", header=header)


def execute(copy: Path, command: str, *more: str) -> CompletedProcess[str]:
    words = shlex.split(command)
    variables = {}
    while words[0] not in ("python", "samestep"):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program = ["-m", "samestep"] if words[0] == "samestep" else []
    done = run(
        *program, *words[1:], *more, cwd=copy, PYTHONPATH=f"{copy / 'src'}:{ROOT}", **variables
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_table_is_trained_predicted_and_exported(copy: Path):
    train, predict, export = COMMANDS[:3]
    said = execute(copy, train, *QUICK).stdout
    assert re.search(r"^epoch 5/5  .*train_loss \d.*val_loss \d.* samples/s$", said, re.M), said
    summary = r"^  test_loss +\d+\.\d+\n  test_mae +\d+\.\d+\n  val_loss +\d"
    assert re.search(summary, said, re.M), said
    assert "images" not in said
    assert execute(copy, predict).stdout == ""
    with (copy / "prices.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7
    assert [*rows[0]] == ["price"]
    lines = execute(copy, export).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "model.safetensors", "model.pt2", "model.onnx",
    ]  # fmt: skip
    with (copy / "runs/houses/metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in table) >= 5
    assert {row["lr"] for row in table} == {"0.01", ""}


def test_masks_are_shown_in_the_report(copy: Path):
    said = execute(copy, COMMANDS[3], *QUICK, "trainer.max_epochs=2").stdout
    last = r"^epoch 2/2  .*train_loss \d.*train_iou \d.*val_loss \d.*val_iou \d"
    assert re.search(last, said, re.M), said
    assert re.search(r"^  test_iou +0\.\d+\n  test_loss +\d.*\n  val_iou", said, re.M), said
    with Image.open(copy / "runs/discs/predictions/0.png") as picture:
        assert picture.mode == "RGB"
    assert "data:image/png;base64" in (copy / "runs/discs/report.html").read_text()
