import csv
import io
import itertools
import json

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image
from torch.utils.data import DataLoader

from project.data.images import Batch
from project.predictions import Predictions, count_classes, draw_confusion, draw_grid

MEAN, STD = [0.5, 0.25, 0.1], [0.25, 0.5, 0.2]
RED = (193, 18, 31)


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
        self.batches = [Batch(*parts) for parts in zip(*columns, strict=True)] if len(ids) else []
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


def run(tmp_path, data, logits, num_batches=2, images_per_batch=3, **flags):
    torch.manual_seed(0)
    predictions = Predictions(str(tmp_path / "predictions"), num_batches, images_per_batch)
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[predictions],
        **({"logger": False} | flags),
    )
    trainer.test(Model(logits), data, verbose=False)
    return predictions


def read(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


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


def test_the_table_holds_the_first_images_of_the_first_batches(tested):
    predictions, data, logits, _ = tested
    assert [row.id for row in predictions.table] == [0, 1, 2, 8, 9, 10]
    for row in predictions.table:
        assert (row.pixels == data.pixels[row.id].permute(1, 2, 0).numpy()).all()
        assert row.truth == row.id % 3
        assert row.guess == logits[row.id].argmax()
        assert row.scores == pytest.approx(logits[row.id].softmax(0).tolist())


def test_images_of_all_batches_are_kept_mistakes_and_the_surest_first(tested):
    ids = [row.id for row in tested[0].grid]
    assert ids[:5] == [23, 17, 2, 9, 4]
    assert ids[5:] == [id_ for id_ in range(24) if id_ not in ids[:5]]
    for row in tested[0].grid:
        assert (row.pixels == tested[1].pixels[row.id].permute(1, 2, 0).numpy()).all()


def test_the_grid_shows_mistakes_first_and_in_red(tested):
    picture = read(tested[3] / "grid.png").astype(int)
    height, width, _ = picture.shape
    rows, columns = (np.abs(picture - RED).sum(2) < 30).nonzero()  # red words
    # Three rows of eight images, of which five are mistakes.
    assert set(columns // (width // 8)) == set(range(5))
    assert rows.max() < 0.4 * height
    first_right = picture[: height // 3, width * 5 // 8 : width * 6 // 8]
    for color in np.unique(tested[0].table[0].pixels.reshape(-1, 3), axis=0):
        assert (first_right == color).all(2).any()


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_grid_names_guess_truth_and_probability(tested):
    mistake, right = tested[0].grid[0], tested[0].table[0]
    grid = draw_grid([mistake, right], ["cat", "dog", "$\\frac"])
    assert words(grid)[1:] == ["cat\n($\\frac)\n98.7%", "cat\n(cat)\n78.7%"]


def test_long_names_stay_under_their_image(tested):
    names = ["German short-haired pointer", "Staffordshire bullterrier", "pug"]
    grid = draw_grid(tested[0].grid[:8], names)
    assert words(grid)[1] == "German short-hai\n(pug)\n98.7%"
    grid.canvas.draw()
    boxes = [text.get_window_extent() for text in grid.axes[0].texts[1:]]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_the_confusion_matrix_is_drawn(tested):
    picture = read(tested[3] / "confusion_matrix.png")
    assert min(picture.shape[:2]) > 300
    assert picture.std() > 30


def test_a_small_confusion_matrix_has_counts_and_the_accuracy():
    figure = draw_confusion(torch.tensor([[7, 0], [2, 1]]), ["cat", "dog"])
    axes = figure.axes[0]
    assert words(figure) == ["7", "", "2", "1"]
    assert axes.get_title() == "80.00% of 10 test images right"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("truth", "guess")
    assert axes.images[0].get_array()[1, 0] == pytest.approx((2 / 3) ** 0.5)


def test_a_large_confusion_matrix_has_colours_only():
    figure = draw_confusion(torch.eye(300, dtype=torch.int64), [f"class {i}" for i in range(300)])
    assert words(figure) == []


def test_kept_mistakes_are_bounded_and_images_may_be_grey(tmp_path):
    data = Data(torch.arange(200) % 2, ["0", "1"], num_channels=1, batch_size=100)
    logits = torch.stack([torch.zeros(200), torch.linspace(1, 2, 200)], dim=1)
    predictions = run(tmp_path, data, logits, num_batches=0)
    assert [row.id for row in predictions.grid] == list(range(198, 70, -2))
    assert predictions.table == []
    assert (predictions.grid[0].pixels == data.pixels[198, 0].numpy()).all()
    picture = read(tmp_path / "predictions" / "grid.png")
    assert picture[:, :, 0].std() > 30


def test_a_rank_without_images_draws_the_confusion_matrix_only(tmp_path):
    data = Data(torch.zeros(0, dtype=torch.int64), ["0", "1"], num_channels=1)
    run(tmp_path, data, torch.zeros(0, 2))
    assert sorted(path.name for path in (tmp_path / "predictions").iterdir()) == [
        "confusion_matrix.png", "confusion_matrix.txt", "guesses.csv", "per_class.csv",
    ]  # fmt: skip


def test_other_ranks_write_nothing(tmp_path):
    class SecondRank(SingleDeviceStrategy):
        is_global_zero = False

    data = Data(torch.zeros(2, dtype=torch.int64), ["0", "1"], num_channels=1)
    run(tmp_path, data, torch.zeros(2, 2), strategy=SecondRank("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_a_table(tmp_path, monkeypatch):
    import wandb  # takes half a second in each process of pytest-xdist

    for kind in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("WANDB_SILENT", "true")
    torch.manual_seed(0)
    data = Data(torch.tensor([0, 1, 1, 0]), ["cat", "dog"], num_channels=1)
    logits = torch.tensor([[2.0, 0], [0, 2], [2, 0], [0, 0.5]])
    logger = WandbLogger(offline=True, save_dir=tmp_path, project="project")
    run(tmp_path, data, logits, logger=logger)
    logger.experiment.finish()
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/test/predictions_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["id", "image", "guess", "truth", "score_cat", "score_dog"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["id"], row["guess"], row["truth"]) for row in rows] == [
        (0, "cat", "cat"),
        (1, "dog", "dog"),
        (2, "cat", "dog"),
    ]
    assert rows[0]["score_cat"] == pytest.approx(logits[0].softmax(0)[0].item())
    staged = [path.read_bytes() for path in (tmp_path / "data").glob("artifacts/staging/*")]
    images = [np.asarray(Image.open(io.BytesIO(file))) for file in staged if file[1:4] == b"PNG"]
    assert len(images) == 3
    for pixels in data.pixels[:3, 0].numpy():
        assert any((image == pixels).all() for image in images)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_guess_is_kept_in_order_of_the_ids(tested):
    _, data, logits, folder = tested
    rows = table(folder / "guesses.csv")
    assert [int(row["id"]) for row in rows] == list(range(24))
    for row in rows:
        scores = logits[int(row["id"])].softmax(0)
        assert row["truth"] == data.class_names[int(row["id"]) % 3]
        assert row["guess"] == data.class_names[scores.argmax()]
        assert float(row["probability"]) == pytest.approx(scores.max().item(), abs=1e-6)


def test_each_class_has_a_line(tested):
    rows = table(tested[3] / "per_class.csv")
    assert [row["class"] for row in rows] == ["cat", "dog", "$\\frac"]
    for row in rows:
        guesses = table(tested[3] / "guesses.csv")
        truth = [guess for guess in guesses if guess["truth"] == row["class"]]
        right = sum(guess["guess"] == row["class"] for guess in truth)
        guessed = sum(guess["guess"] == row["class"] for guess in guesses)
        assert int(row["test images"]) == len(truth) == 8
        assert float(row["found (recall)"]) == pytest.approx(right / 8, abs=1e-4)
        assert float(row["right (precision)"]) == pytest.approx(right / guessed, abs=1e-4)
    empty = count_classes(torch.tensor([[3, 0], [0, 0]]), ["a", "b"])
    assert empty[2] == ["b", 0, "", ""]


def test_pictures_are_described_in_words(tested):
    texts = {path.stem: path.read_text() for path in tested[3].glob("*.txt")}
    assert texts.keys() == {"grid", "sample", "confusion_matrix"}
    assert texts["grid"].startswith("Most confident mistakes\n24 test images")
    assert "5 of these images. The surest mistakes are: $\\frac taken for cat" in texts["grid"]
    assert "19 of 24 test images are right" in texts["confusion_matrix"]
    assert texts["sample"].count("%") == 16


def test_the_sample_is_drawn_by_lot_from_all_batches(tmp_path):
    data = Data(torch.arange(200) % 2, ["0", "1"], num_channels=1, batch_size=20)
    predictions = run(tmp_path, data, torch.zeros(200, 2), num_batches=0)
    ids = [prediction.id for _, prediction in predictions.sample]
    assert len(set(ids)) == 16
    assert len({id_ // 20 for id_ in ids}) > 5
    again = run(tmp_path, data, torch.zeros(200, 2), num_batches=0)
    assert [prediction.id for _, prediction in again.sample] == ids
