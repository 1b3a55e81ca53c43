"""The pictures and the table that a test leaves, of images whose pixels and logits are known."""

import csv
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image
from torch.utils.data import DataLoader

from project.callbacks.pictures import Predictions, draw_grid
from project.data.images import Batch
from samestep.report.files import read_predictions

RED = (193, 18, 31)


class Data(L.LightningDataModule):
    """Test images of random pixels, none bright red; the last batch is empty."""

    def __init__(self, labels, class_names, num_channels=3, batch_size=8):
        super().__init__()
        self.class_names = class_names
        self.pixels = torch.randint(150, (len(labels), num_channels, 8, 8), dtype=torch.uint8)
        images, ids = self.pixels, torch.arange(len(labels))
        columns = (column.split(batch_size) for column in (images, labels, ids))
        self.batches = [Batch(*parts) for parts in zip(*columns, strict=True)]
        self.batches.append(Batch(images[:0], labels[:0], ids[:0]))

    def test_dataloader(self):
        return DataLoader(self.batches, batch_size=None)


class Model(L.LightningModule):
    """Has the given logits ``[N, num_classes]`` for the images."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def test_step(self, batch, batch_idx):
        return self.logits[batch.ids]


def run(tmp_path: Path, data: Data, logits, **flags) -> Predictions:
    predictions = Predictions(str(tmp_path / "predictions"))
    trainer = L.Trainer(
        accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[predictions], **flags,
    )  # fmt: skip
    trainer.test(Model(logits), data, verbose=False)
    return predictions


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """24 images of 3 classes, 5 of them mistaken: 23 most surely, 4 least."""
    tmp_path = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    labels = torch.arange(24) % 3
    logits = torch.eye(3)[labels] * 2
    for strength, mistake in enumerate([4, 9, 2, 17, 23], start=1):
        logits[mistake] = torch.eye(3)[(labels[mistake] + 1) % 3] * strength
    data = Data(labels, ["cat", "dog", "$\\frac"])
    return run(tmp_path, data, logits), data, logits, tmp_path / "predictions"


def test_the_grid_shows_mistakes_only_and_the_surest_first(tested):
    predictions, data, _, folder = tested
    ids = [row.id for row in predictions.grid]
    assert ids == [23, 17, 2, 9, 4]
    for row in predictions.grid:
        assert (row.pixels == data.pixels[row.id].permute(1, 2, 0).numpy()).all()
    with Image.open(folder / "grid.png") as image:
        picture = np.asarray(image.convert("RGB")).astype(int)
    height, width, _ = picture.shape
    rows, columns = (np.abs(picture - RED).sum(2) < 30).nonzero()  # red words
    assert set(columns // (width // 8)) == set(range(5))
    assert rows.min() > 0.5 * height  # below the images
    words = [text.get_text() for text in draw_grid(predictions.grid).axes[0].texts]
    assert (words[1], len(words)) == ("cat\n($\\frac)\n98.7%", 6)


def test_the_report_draws_both_pictures_from_tables(tested):
    *_, folder = tested
    drawn = {item.title: item for item in read_predictions(folder.parent)}
    matrix = drawn["Confusion matrix"]
    assert matrix.rows == [
        ["truth / guess", "cat", "dog", "$\\frac"],
        ["cat", "7", "1", "0"], ["dog", "0", "7", "1"], ["$\\frac", "3", "0", "5"],
    ]  # fmt: skip
    assert matrix.text == (
        "19 of 24 test images are right. The most frequent mistakes: $\\frac taken for cat (3), "
        "cat taken for dog (1), dog taken for $\\frac (1)."
    )
    tiles = drawn["Most confident mistakes"].tiles
    assert tiles[0][1] == "guess cat, truth $\\frac, probability 98.7%"
    assert len(tiles) == 5


def test_a_test_without_mistakes_leaves_no_grid(tmp_path: Path):
    data = Data(torch.tensor([0, 1]), ["0", "1"], num_channels=1)
    run(tmp_path, data, torch.eye(2).flip(0))
    assert (tmp_path / "predictions/grid.png").exists()
    run(tmp_path, data, torch.eye(2))  # the same run, continued
    names = {path.name for path in (tmp_path / "predictions").iterdir()}
    of_matrix = {f"confusion_matrix.{suffix}" for suffix in ("csv", "png", "txt")}
    assert names == {*of_matrix, "guesses.csv"}


def test_other_ranks_and_empty_tests_write_nothing(tmp_path: Path):
    class SecondRank(SingleDeviceStrategy):
        is_global_zero = False

    data = Data(torch.zeros(2, dtype=torch.int64), ["0", "1"], num_channels=1)
    run(tmp_path, data, torch.zeros(2, 2), strategy=SecondRank("cpu"))
    run(tmp_path, Data(torch.zeros(0, dtype=torch.int64), ["0", "1"]), torch.zeros(0, 2))
    assert list(tmp_path.iterdir()) == []


def test_every_guess_is_kept_in_order_of_the_ids(tested):
    _, data, logits, folder = tested
    with (folder / "guesses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["id"]) for row in rows] == list(range(24))
    for row in rows:
        scores = logits[int(row["id"])].softmax(0)
        assert row["truth"] == data.class_names[int(row["id"]) % 3]
        assert row["guess"] == data.class_names[scores.argmax()]
        assert float(row["probability"]) == pytest.approx(scores.max().item(), abs=1e-6)
