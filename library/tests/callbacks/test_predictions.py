"""The tables that a test leaves, of samples whose images and scores are known."""

import base64
import csv
import io
import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import TensorDataset

from library.tests.kit import on_ranks
from library.tests.programs import run_code
from library.tests.test_loggers import records_of_wandb
from samestep import BatchLoader, Trainer, loggers
from samestep.callbacks import predictions
from samestep.callbacks.predictions import Predictions
from samestep.report.files import read_predictions

NAMES = ["cat", "dog", "$\\frac"]
PLAIN = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Data(L.LightningDataModule):
    """Test images of random pixels, with labels that count on, and the scores that they get."""

    def __init__(self, scores, class_names=None, num_channels=3, size=8, batch_size=8):
        super().__init__()
        self.class_names = class_names
        shape = len(scores), num_channels, size, size
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self.labels = torch.arange(len(scores)) % scores.shape[1]
        self.samples = TensorDataset(self.images, self.labels, scores)
        self.batch_size = batch_size

    def test_dataloader(self):
        return BatchLoader(self.samples, self.batch_size, shuffle=False)


class Model(L.LightningModule):
    """Returns the columns of each batch."""

    def test_step(self, batch, batch_idx) -> Any:
        images, labels, scores = batch
        return {"truth": labels, "probability": scores, "image": images}


class WithoutImages(Model):
    def test_step(self, batch, batch_idx):
        columns = super().test_step(batch, batch_idx)
        return {"truth": columns["truth"], "probability": columns["probability"].bfloat16()}


class Loss(Model):
    def test_step(self, batch, batch_idx):
        return batch[2].mean()


def make_scores() -> torch.Tensor:
    """Of 24 samples of 3 classes, 5 of them mistaken: 23 most surely, 4 least."""
    labels = torch.arange(24) % 3
    logits = torch.eye(3)[labels] * 2
    for strength, mistake in enumerate([4, 9, 2, 17, 23], start=1):
        logits[mistake] = torch.eye(3)[(labels[mistake] + 1) % 3] * strength
    return logits.softmax(1)


def run(tmp_path: Path, data: Data, model: Any = Model, **flags: Any) -> list[str]:
    """Test a model, and return the names of the files that it leaves."""
    folder = tmp_path / "predictions"
    options: dict[str, Any] = {**PLAIN, "logger": False, **flags}
    trainer = L.Trainer(
        default_root_dir=tmp_path, callbacks=[Predictions(str(folder))],
        enable_checkpointing=False, **options,
    )  # fmt: skip
    trainer.test(model(), data, verbose=False)
    return sorted(path.name for path in folder.glob("*"))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


FILES = ["confusion_matrix.csv", "confusion_matrix.txt", "guesses.csv", "guesses.txt"]


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    data = Data(make_scores(), NAMES)
    assert run(folder, data) == [*FILES[:2], "grid.csv", "grid.txt", *FILES[2:]]
    return data, folder / "predictions"


def test_each_guess_has_a_row_with_the_scores_of_all_classes(tested):
    _, folder = tested
    rows = read(folder / "guesses.csv")
    assert [*rows[0]] == ["id", "truth", "guess", "probability", *NAMES]
    assert [int(row["id"]) for row in rows] == list(range(24))
    for number, scores in enumerate(make_scores()):
        row = rows[number]
        assert (row["truth"], row["guess"]) == (NAMES[number % 3], NAMES[scores.argmax()])
        found = [float(row[name]) for name in ("probability", *NAMES)]
        assert found == pytest.approx([scores.max().item(), *scores.tolist()], abs=1e-6)
    assert max(len(row["cat"]) for row in rows) <= len("0.123457"), "six places"


def test_the_report_draws_the_matrix_and_the_surest_mistakes(tested):
    data, folder = tested
    matrix, grid, guesses = read_predictions(folder.parent)
    assert matrix.title == "Confusion matrix"
    assert matrix.matrix == [
        ["truth / guess", "cat", "dog", "$\\frac"],
        ["cat", "7", "1", "0"], ["dog", "0", "7", "1"], ["$\\frac", "3", "0", "5"],
    ]  # fmt: skip
    assert matrix.text == (
        "19 of 24 test samples are right. The most frequent mistakes: $\\frac taken for cat (3), "
        "dog taken for $\\frac (1), cat taken for dog (1)."
    )
    assert grid.title == "Most confident mistakes"
    assert grid.text == "5 test images of rank zero, surest first."
    assert grid.tiles[0][1] == "guess cat, truth $\\frac, probability 98.7%"
    for (address, _), number in zip(grid.tiles, [23, 17, 2, 9, 4], strict=True):
        with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
            assert (np.asarray(image) == data.images[number].permute(1, 2, 0).numpy()).all()
    assert (guesses.title, guesses.rows[24][0]) == ("All guesses", "23")


def test_the_grid_is_bounded_and_images_may_be_large_and_grey(tmp_path: Path):
    scores = torch.stack([torch.zeros(200), torch.linspace(0.5, 1, 200)], dim=1)
    data = Data(scores, num_channels=1, size=100, batch_size=150)
    run(tmp_path, data)
    rows = read(tmp_path / "predictions/grid.csv")
    assert [row["probability"] for row in rows] == [
        f"{scores[number, 1]:.1%}" for number in range(198, 70, -2)
    ]
    assert {row["truth"] for row in rows} == {"0"}, "without names the classes have numbers"
    content = base64.b64decode(rows[0]["picture"].partition(",")[2])
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (96, 96)


def test_stale_files_leave(tmp_path: Path):
    scores = torch.eye(2)
    assert "grid.csv" in run(tmp_path, Data(scores.flip(0)))
    (tmp_path / "predictions/mine.txt").touch()
    assert run(tmp_path, Data(scores)) == [*FILES, "mine.txt"]
    text = (tmp_path / "predictions/confusion_matrix.txt").read_text()
    assert text == (
        "Confusion matrix\n2 of 2 test samples are right. The most frequent mistakes: none.\n"
    )
    assert "grid.csv" in run(tmp_path, Data(scores.flip(0)))
    assert run(tmp_path, Data(scores.flip(0)), WithoutImages) == [*FILES, "mine.txt"]
    assert run(tmp_path, Data(scores), Loss) == ["mine.txt"]


def test_other_ranks_other_models_and_empty_tests_write_nothing(tmp_path: Path):
    class SecondRank(SingleDeviceStrategy):
        is_global_zero = False

    run(tmp_path, Data(torch.eye(2)), strategy=SecondRank("cpu"))
    run(tmp_path, Data(torch.eye(2)), Loss)
    run(tmp_path, Data(torch.eye(2)), limit_test_batches=0)
    assert list(tmp_path.iterdir()) == []


def test_classes_without_a_name_have_numbers_also_without_a_datamodule(tmp_path: Path):
    run(tmp_path, Data(torch.eye(3), ["cat"]))
    assert [*read(tmp_path / "predictions/guesses.csv")[0]][4:] == ["cat", "1", "2"]
    run(tmp_path, Data(torch.eye(3)).test_dataloader())
    assert [*read(tmp_path / "predictions/guesses.csv")[0]][4:] == ["0", "1", "2"]


def write_on_ranks(folder: str, batch_size: int) -> None:
    """Test 22 samples."""
    data = Data(make_scores()[:22], NAMES, batch_size=batch_size)
    trainer = Trainer(
        run_dir=f"{folder}/run", callbacks=[Predictions(folder)], logger=False,
        strategy="ddp", devices="auto", **PLAIN,
    )  # fmt: skip
    trainer.test(Model(), datamodule=data, verbose=False)


@pytest.mark.program
@pytest.mark.parametrize("batch_size", [7, 8])
def test_the_guesses_of_two_ranks_are_those_of_one(tmp_path: Path, batch_size: int):
    """The last batch of 22 samples in batches of 7 is one sample: a rank has none."""
    for num in (1, 2):
        done = on_ranks(write_on_ranks, str(tmp_path / str(num)), batch_size, num=num)
        assert done.returncode == 0, done.stderr
    for name in ("guesses.csv", "confusion_matrix.csv", "confusion_matrix.txt"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    assert len(read(tmp_path / "2/guesses.csv")) == 22


def track(run_dir: str) -> None:
    """Test with three trackers; W&B gets 20 of 24 guesses."""
    predictions.WANDB_ROWS = 20
    Path(run_dir).mkdir()
    Path(run_dir, "config.yaml").write_text("model: {lr: 0.125}\n")
    trackers = [
        TensorBoardLogger(run_dir, name="tensorboard", version=""),
        loggers.wandb_logger(run_dir, "mine", "p", None, None, []),
        loggers.mlflow_logger(run_dir, "mine", "project", None),
        CSVLogger(run_dir),
    ]
    run(Path(run_dir), Data(make_scores(), NAMES), logger=trackers)


@pytest.mark.program
def test_trackers_get_the_tables_and_the_mistakes(tmp_path: Path):
    run_dir = tmp_path / "mine"
    code = f"import sys; from {__name__} import *; track(sys.argv[1])"
    done = run_code(code, str(run_dir), WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    guesses = read(run_dir / "predictions/guesses.csv")

    logged = {}
    for record in records_of_wandb(run_dir):
        for item in record.history.item:
            logged["/".join(item.nested_key)] = json.loads(item.value_json)
    (files,) = run_dir.glob("wandb/offline-run-*/files")
    table = json.loads((files / logged["test/predictions/path"]).read_text())
    assert table["columns"] == [*guesses[0]]
    assert [[*map(str, row)] for row in table["data"]] == [[*row.values()] for row in guesses[:20]]
    table = json.loads((files / logged["test/confusion_matrix/path"]).read_text())
    assert table["data"] == [["cat", 7, 1, 0], ["dog", 0, 7, 1], ["$\\frac", 3, 0, 5]]
    assert logged["test/grid/captions"][0] == "guess cat, truth $\\frac, probability 98.7%"
    assert len(logged["test/grid/filenames"]) == 5
    for name in logged["test/grid/filenames"]:
        assert (files / name).read_bytes().startswith(b"\x89PNG")

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    tags = events.Tags()["images"]
    assert tags[0] == "test/grid/01: guess cat, truth $\\frac, probability 98.7%"
    assert len(tags) == 5
    assert events.Images(tags[0])[0].encoded_image_string.startswith(b"\x89PNG")

    artifacts = {path.name for path in run_dir.glob("mlflow/**/artifacts/test/*")}
    assert artifacts == {"guesses.csv", "confusion_matrix.csv", "grid.csv"}
