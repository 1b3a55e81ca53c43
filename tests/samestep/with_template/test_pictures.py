"""The pictures and the table that a test leaves, of images whose pixels and logits are known."""

from pathlib import Path

import torch

from project.callbacks.pictures import draw_confusion
from tests.project.callbacks import test_pictures

Data, run = test_pictures.Data, test_pictures.run
tested = test_pictures.tested  # a fixture


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
    assert texts["grid"].startswith("Most confident mistakes\n5 test images, surest first")
    assert texts["grid"].endswith(
        "cat ($\\frac), cat ($\\frac), cat ($\\frac), dog (cat), $\\frac (dog)\n"
    )
    assert "19 of 24 test images are right" in texts["confusion_matrix"]
