"""Predictions to look at: two pictures of the test, what they show in words, and all guesses."""

import base64
import csv
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from project.data.images import Batch
from samestep import gather

GRID_IMAGES = 64  # at most
NUM_MISTAKES = 5  # in words


class Prediction(NamedTuple):
    """The model's guess for one test image."""

    id: int
    truth: str
    guess: str
    probability: float
    pixels: NDArray[np.uint8]  # [H, W], or [H, W, 3] in colour


class Predictions(L.Callback):
    """Leaves test predictions to look at, on rank zero.

    Writes into ``dirpath``, where ``report.html`` finds them:

    - ``grid.png``: rank zero's mistakes, surest first; absent if there are none.
    - ``confusion_matrix.png``: the images of all ranks, counted.
    - ``guesses.csv``: the guess for each image of all ranks.
    - ``<picture>.txt``: title and description of a picture, for those who cannot see it.
    - ``<picture>.csv``: its content, which the report draws instead of the picture.

    W&B, TensorBoard and MLflow get the pictures, as ``test/grid`` and ``test/confusion_matrix``.
    A test of anything but a ``Batch`` of images leaves nothing.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)

    def on_test_start(self, *_: Any) -> None:
        """Forget the test before."""
        self.grid: list[Prediction] = []
        self.guesses: list[Tensor] = []  # of this rank, [B, 4] each: id, truth, guess, probability

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Keep all guesses, and the images that the grid will show."""
        if not isinstance(batch, Batch):
            return
        probabilities = outputs.float().softmax(1).amax(1)
        guesses = outputs.argmax(1)
        columns = (batch.ids, batch.labels, guesses, probabilities)
        rows = torch.stack([column.double().cpu() for column in columns], dim=1)
        self.guesses.append(rows)
        if not trainer.is_global_zero:
            return
        wrong = (guesses != batch.labels).nonzero()[:, 0]
        surest = probabilities[wrong].argsort(descending=True, stable=True)[:GRID_IMAGES]
        chosen = wrong[surest].cpu()
        named = name_guesses(rows[chosen], trainer.datamodule.class_names)
        pixels = to_pixels(batch.images[chosen])
        for row, image in zip(named, pixels, strict=True):
            self.grid.append(Prediction(*row, image))
        self.grid.sort(key=lambda prediction: -prediction.probability)
        del self.grid[GRID_IMAGES:]

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the pictures and the table; every rank must call this."""
        parts = gather(torch.cat([torch.empty(0, 4), *self.guesses]))
        rows = torch.cat(parts)
        if not trainer.is_global_zero or not len(rows):
            return
        class_names = trainer.datamodule.class_names
        self.dirpath.mkdir(parents=True, exist_ok=True)
        write_guesses(self.dirpath / "guesses.csv", rows, class_names)
        for old in self.dirpath.glob("grid.*"):
            old.unlink()
        confusion = count_confusion(rows, len(class_names))
        words = describe_confusion(confusion, class_names)
        write_confusion(self.dirpath / "confusion_matrix.csv", confusion, class_names)
        self.save(trainer, "confusion_matrix", draw_confusion(confusion, class_names), words)
        if self.grid:
            words = describe_grid(self.grid, num_ranks=len(parts))
            write_grid(self.dirpath / "grid.csv", self.grid)
            self.save(trainer, "grid", draw_grid(self.grid), words)

    def save(self, trainer: Any, name: str, figure: Figure, words: str) -> None:
        """Write a picture and its description, and show it in the trackers."""
        path = self.dirpath / f"{name}.png"
        figure.savefig(path, dpi=120)
        path.with_suffix(".txt").write_text(f"{words}\n", encoding="utf-8")
        for logger in trainer.loggers:
            log_picture(logger, f"test/{name}", figure, path)


def write_guesses(path: Path, rows: Tensor, class_names: list[str]) -> None:
    """Write a table of guesses, in the order of the data set."""
    named = name_guesses(rows[rows[:, 0].argsort()], class_names)
    guesses = [[*row, f"{probability:.6f}"] for *row, probability in named]
    write_table(path, ["id", "truth", "guess", "probability"], guesses)


def count_confusion(rows: Tensor, num_classes: int) -> Tensor:
    """Test images ``[num_classes, num_classes]`` by class and guess."""
    truths, guesses = rows[:, 1].long(), rows[:, 2].long()
    cells = truths * num_classes + guesses
    return cells.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def describe_confusion(confusion: Tensor, class_names: list[str]) -> str:
    """How many images are right, and which classes are mistaken for which most often."""
    right, total = int(confusion.diag().sum()), int(confusion.sum())
    text = f"Confusion matrix\n{right} of {total} test images are right."
    mistakes = confusion - confusion.diag().diag()
    counts, cells = mistakes.flatten().sort(descending=True, stable=True)
    named = []
    for count, cell in zip(counts[:NUM_MISTAKES].tolist(), cells.tolist(), strict=False):
        truth, guess = divmod(cell, len(class_names))
        if count:
            named.append(f"{class_names[truth]} taken for {class_names[guess]} ({count})")
    if named:
        text += f" The most frequent mistakes: {', '.join(named)}."
    return text


def write_confusion(path: Path, confusion: Tensor, class_names: list[str]) -> None:
    """Write the counts as a table with a row for each truth and a column for each guess."""
    counts = zip(class_names, confusion.tolist(), strict=True)
    write_table(path, ["truth / guess", *class_names], [[name, *row] for name, row in counts])


def write_grid(path: Path, grid: list[Prediction]) -> None:
    """Write a table with an image in each row, which the report shows with its guess."""
    tiles = []
    for p in grid:
        image = Image.fromarray(p.pixels)
        image.thumbnail((96, 96))  # larger ones would fill the report
        content = io.BytesIO()
        image.save(content, "PNG")
        address = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
        tiles.append([address, p.guess, p.truth, f"{p.probability:.1%}"])
    write_table(path, ["picture", "guess", "truth", "probability"], tiles)


def write_table(path: Path, heading: list[str], rows: list[list[Any]]) -> None:
    """Write a table with commas."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([heading, *rows])


def describe_grid(grid: list[Prediction], num_ranks: int) -> str:
    """What the grid shows, in words."""
    whose = f" that rank zero of {num_ranks} ranks has tested" if num_ranks > 1 else ""
    mistakes = ", ".join(f"{p.guess} ({p.truth})" for p in grid)
    return (
        f"Most confident mistakes\n{len(grid)} test images{whose}, surest first: "
        f"guess, truth in brackets and probability. {mistakes}"
    )


def name_guesses(rows: Tensor, class_names: list[str]) -> list[tuple[int, str, str, float]]:
    """Id, names of truth and guess, and probability, of rows ``[N, 4]``."""
    return [
        (int(id_), class_names[int(truth)], class_names[int(guess)], probability)
        for id_, truth, guess, probability in rows.tolist()
    ]


def to_pixels(images: Tensor) -> NDArray[np.uint8]:
    """uint8 ``[B, H, W]``, or ``[B, H, W, 3]`` in colour, of images ``[B, C, H, W]``."""
    pixels: NDArray[np.uint8] = images.movedim(1, 3).cpu().numpy()
    return pixels[..., :3] if pixels.shape[3] >= 3 else pixels[..., 0]


def draw_grid(predictions: list[Prediction]) -> Figure:
    """Images, and under each the guess, the truth in brackets, and the guess's probability."""
    width, height = 8 * 1.36, 0.35 + math.ceil(len(predictions) / 8) * 1.78  # in inches
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(0.08, 0.22, "Test images: guess (truth), probability", fontsize=10)
    for index, p in enumerate(predictions):
        x, y = 0.08 + index % 8 * 1.36, 0.35 + index // 8 * 1.78
        axes.imshow(p.pixels, cmap="gray", vmin=0, vmax=255, extent=(x, x + 1.2, y + 1.2, y))
        text = f"{p.guess[:16]}\n({p.truth[:16]})\n{p.probability:.1%}"
        axes.text(x, y + 1.24, text, fontsize=8, va="top", color="#c1121f", parse_math=False)
    return figure


def draw_confusion(confusion: Tensor, class_names: list[str]) -> Figure:
    """Counts ``[num_classes, num_classes]`` by truth and guess, coloured by share of the truth."""
    num_classes = len(class_names)
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xlabel="guess", ylabel="truth")
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1)  # the root shows few mistakes
    if num_classes <= 20:  # with more there is no room: the axes number the classes
        names = [name[:16] for name in class_names]
        rotation = 90 if max(map(len, names)) > 3 else 0
        axes.set_xticks(range(num_classes), names, rotation=rotation, parse_math=False)
        axes.set_yticks(range(num_classes), names, parse_math=False)
        for (row, column), count in np.ndenumerate(confusion.numpy()):
            color = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, count or "", color=color, ha="center", va="center", fontsize=8)
    right, total = int(confusion.diag().sum()), int(confusion.sum())
    axes.set_title(f"{right / max(total, 1):.2%} of {total} test images right", fontsize=10)
    return figure


def log_picture(logger: Any, name: str, figure: Figure, path: Path) -> None:
    """Show a picture in the tracker: W&B, TensorBoard or MLflow; other loggers get nothing."""
    if isinstance(logger, WandbLogger):
        logger.log_image(name, [str(path)])
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_figure(name, figure, close=False)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_artifact(logger.run_id, str(path), name.partition("/")[0])
