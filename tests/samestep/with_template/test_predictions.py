"""The pictures and the table that a test leaves, of images whose pixels and logits are known."""

from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from project.data.images import Batch
from project.predictions import Predictions, draw_confusion

MEAN, STD = [0.5, 0.25, 0.1], [0.25, 0.5, 0.2]


class Data(L.LightningDataModule):
    """Test images of random pixels, none bright red; the last batch is empty."""

    def __init__(self, labels, class_names, num_channels=3, batch_size=8):
        super().__init__()
        self.class_names = class_names
        self.mean, self.std = MEAN[:num_channels], STD[:num_channels]
        self.pixels = torch.randint(150, (len(labels), num_channels, 8, 8), dtype=torch.uint8)
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
        images, ids = (self.pixels / 255 - mean) / std, torch.arange(len(labels))
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
        self.confusion = torch.zeros(logits.shape[1], logits.shape[1], dtype=torch.int64)

    def test_step(self, batch, batch_idx):
        logits = self.logits[batch.ids]
        for truth, guess in zip(batch.labels, logits.argmax(1), strict=True):
            self.confusion[truth, guess] += 1
        return logits


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


def test_the_confusion_matrix_has_counts_while_there_is_room():
    figure = draw_confusion(torch.tensor([[7, 0], [2, 1]]), ["cat", "dog"])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["7", "", "2", "1"]
    assert axes.get_title() == "80.00% of 10 test images right"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    large = draw_confusion(torch.eye(300, dtype=torch.int64), [f"class {i}" for i in range(300)])
    assert list(large.axes[0].texts) == []


def test_the_grid_is_bounded_and_images_may_be_grey(tmp_path: Path):
    data = Data(torch.arange(200) % 2, ["0", "1"], num_channels=1, batch_size=100)
    logits = torch.stack([torch.zeros(200), torch.linspace(1, 2, 200)], dim=1)
    predictions = run(tmp_path, data, logits)
    assert [row.id for row in predictions.grid] == list(range(198, 70, -2))
    assert (predictions.grid[0].pixels == data.pixels[198, 0].numpy()).all()


def test_pictures_are_described_in_words(tested):
    texts = {path.stem: path.read_text() for path in tested[3].glob("*.txt")}
    assert texts.keys() == {"grid", "confusion_matrix"}
    assert texts["grid"].startswith("Most confident mistakes\n24 test images")
    assert texts["grid"].endswith(
        "cat ($\\frac), cat ($\\frac), cat ($\\frac), dog (cat), $\\frac (dog)\n"
    )
    assert "19 of 24 test images are right" in texts["confusion_matrix"]
