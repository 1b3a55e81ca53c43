"""The skeleton: it learns, on any number of ranks, and continues."""

import csv
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from examples.skeleton.data import SkeletonData
from examples.skeleton.model import SkeletonModel
from samestep import BatchLoader, load_run, predict
from samestep.command_line import call
from samestep.export import main as export
from tests.conftest import run

SKELETON = ["data=skeleton", "model=skeleton", "callbacks.checkpoints.monitor=val/loss",
            "callbacks.checkpoints.mode=min", "trainer.accelerator=cpu",
            "report=false"]  # fmt: skip


def train(root: Path, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    """Train a run, and return the weights of its last checkpoint."""
    done = run("train.py", *SKELETON, f"run_root={root}", *overrides, RUN_ID=name)
    assert done.returncode == 0, done.stderr
    last = torch.load(root / name / "checkpoints/last.ckpt", weights_only=True)
    weights: dict[str, torch.Tensor] = last["state_dict"]
    return weights


@pytest.mark.program
def test_it_learns_and_continues_bit_by_bit(tmp_path: Path):
    whole = train(tmp_path, "whole", "trainer.max_epochs=4")
    train(tmp_path, "parts", "trainer.max_epochs=2")
    parts = train(tmp_path, "parts", "trainer.max_epochs=4")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    with (tmp_path / "whole/metrics.csv").open() as file:
        losses = [float(row["val/loss"]) for row in csv.DictReader(file) if row["val/loss"]]
    assert losses[-1] < 0.8 * losses[0]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train(root, "patients", "trainer.max_epochs=1")
    return root / "patients"


@pytest.mark.program
def test_two_ranks_learn_what_one_rank_learns(run_dir: Path, tmp_path: Path):
    one = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    two = train(tmp_path, "two", "trainer.max_epochs=1", "trainer.devices=2")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5)


@pytest.fixture
def predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The skeleton, with what ``samestep predict`` needs."""

    def predict_dataloader(data: SkeletonData) -> BatchLoader:
        rows = [np.loadtxt(file, np.float32, delimiter=",") for file in data.predict_files]
        return BatchLoader(TensorDataset(torch.tensor(np.concatenate(rows))), 1024)

    monkeypatch.setattr(SkeletonData, "predict_files", [], raising=False)
    monkeypatch.setattr(SkeletonData, "predict_dataloader", predict_dataloader)
    monkeypatch.setattr(SkeletonModel, "predict_step", lambda model, batch, _: model(batch[0]))


@pytest.mark.usefixtures("predicts")
def test_any_model_predicts_by_its_own_step(run_dir: Path, tmp_path: Path, capsys, monkeypatch):
    patients = torch.randn(3, 10)
    np.savetxt(tmp_path / "new.csv", patients.numpy(), delimiter=",")
    words = [str(run_dir), str(tmp_path / "new.csv")]
    assert call(lambda: predict.main(words)) == 0
    heading, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert heading == ["prediction"]
    wanted = load_run(run_dir)[0](patients).flatten()
    assert [float(row[0]) for row in rows] == pytest.approx(wanted.tolist(), abs=1e-4)

    words.append("--output")
    assert call(lambda: predict.main([*words, str(tmp_path / "out.csv")])) == 0
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4
    assert call(lambda: predict.main([*words, str(tmp_path / "out.pt")])) == 0
    # As docs/use.md says: an entry for each batch, as predict_step gave it.
    (batch,) = torch.load(tmp_path / "out.pt")
    torch.testing.assert_close(batch, wanted[:, None])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert call(lambda: predict.main([*words, "out.parquet"])) == 2
    assert "--output out.parquet: needs pyarrow; `pip install pyarrow`" in capsys.readouterr().err
    assert call(lambda: predict.main([*words, "out.txt"])) == 2
    assert "--output out.txt: must end in .csv, .parquet or .pt" in capsys.readouterr().err


def test_a_run_that_predicts_nothing_is_one_message(run_dir: Path, capsys):
    assert call(lambda: predict.main([str(run_dir)])) == 2
    said = capsys.readouterr().err
    assert "SkeletonData has no predict_dataloader" in said
    assert said.count("\n") == 1


def test_any_model_with_an_example_is_exported(run_dir: Path, capsys):
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    assert call(lambda: export([str(run_dir), "--onnx"])) == 0
    differences = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert [*differences] == ["model.safetensors", "model.pt2", "model.onnx"]
    assert all(float(difference) < 1e-4 for difference in differences.values())
    program = torch.export.load(run_dir / "export/model.pt2").module()
    x = torch.randn(5, 10)
    torch.testing.assert_close(program(x), load_run(run_dir)[0](x).detach())
    card = (run_dir / "export/README.md").read_text()
    assert "float32 [B, 10]" in card
    assert "test/loss" in card


def test_onnx_without_its_packages_is_one_line(run_dir: Path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert call(lambda: export([str(run_dir), "--onnx"])) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --onnx: needs the package onnxscript, of the extra onnx; ")
    assert said.count("\n") == 1
