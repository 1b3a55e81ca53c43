"""Predictions to look at: pictures, tables, and what they show in words."""

import csv
import math
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from project.data.images import Batch
from samestep.ranks.process_group import gather

GRID_IMAGES = 64  # at most
SAMPLE_IMAGES = 16
WORST = 10  # mistakes that are described in words


class Prediction(NamedTuple):
    """The model's guess for one test image."""

    id: int
    guess: int
    truth: int
    scores: list[float]  # probability of each class
    pixels: NDArray[np.uint8]  # [H, W], or [H, W, 3] in colour


def has_pictures(trainer: Any, pl_module: Any) -> bool:
    """Whether images were classified; other models may have a ``confusion`` of their own."""
    return hasattr(pl_module, "confusion") and hasattr(trainer.datamodule, "class_names")


class Predictions(L.Callback):
    """Leaves test predictions to look at, on rank zero.

    Writes into ``dirpath``, where ``report.html`` finds them:

    - ``grid.png``: rank zero's mistakes, surest first, then images it got right.
    - ``sample.png``: some of rank zero's images, drawn by lot; the same ones in each run.
    - ``confusion_matrix.png`` and ``per_class.csv``: the images of all ranks, counted.
    - ``guesses.csv``: the guess for each image of all ranks, with which runs are compared.
    - ``<picture>.txt``: title and description of a picture, for those who cannot see it.

    W&B, TensorBoard and MLflow get grid and confusion matrix as ``test/grid`` and
    ``test/confusion_matrix``, and W&B the table ``test/predictions``.

    Args:
        dirpath: where the pictures go.
        num_batches_to_log: test batches of which images are in the table.
        images_per_batch: images of each of them, from its start.
    """

    def __init__(self, dirpath: str, num_batches_to_log: int, images_per_batch: int) -> None:
        self.dirpath = Path(dirpath)
        self.num_batches_to_log = num_batches_to_log
        self.images_per_batch = images_per_batch

    def on_test_start(self, *_: Any) -> None:
        """Forget the test before."""
        self.table: list[Prediction] = []
        self.grid: list[Prediction] = []
        self.sample: list[tuple[float, Prediction]] = []
        self.guesses: list[Tensor] = []  # of this rank, [B, 4] each: id, truth, guess, probability
        self.lots = torch.Generator().manual_seed(0)

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int, *_: Any
    ) -> None:
        """Keep what the tables and the pictures will show."""
        if not has_pictures(trainer, pl_module):
            return
        scores = outputs.float().softmax(1)
        guesses = outputs.argmax(1)
        columns = (batch.ids, batch.labels, guesses, scores.amax(1))
        self.guesses.append(torch.stack([column.double().cpu() for column in columns], dim=1))
        if not trainer.is_global_zero:
            return
        data = trainer.datamodule

        def choose(positions: Tensor) -> list[Prediction]:
            pixels = to_pixels(batch.images[positions], data.mean, data.std)
            columns = (batch.ids, guesses, batch.labels, scores)
            values = [column[positions].tolist() for column in columns]
            return [Prediction(*row) for row in zip(*values, pixels, strict=True)]

        if batch_idx < self.num_batches_to_log:
            self.table += choose(torch.arange(len(batch.ids))[: self.images_per_batch])
        # Mistakes first, the surest before the others; then images that were guessed right.
        sureness = scores.amax(1).where(guesses != batch.labels, -1.0)
        self.grid += choose(sureness.argsort(descending=True, stable=True)[:GRID_IMAGES].cpu())
        self.grid.sort(key=lambda p: p.guess == p.truth or -max(p.scores))
        del self.grid[GRID_IMAGES:]
        # Each image draws a lot, and the lowest ones win: every image has the same chance.
        lots = torch.rand(len(batch.ids), generator=self.lots)
        lowest = lots.argsort()[:SAMPLE_IMAGES]
        self.sample += zip(lots[lowest].tolist(), choose(lowest), strict=True)
        self.sample.sort(key=lambda drawn: drawn[0])
        del self.sample[SAMPLE_IMAGES:]

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the pictures and tables, and log the table; every rank must call this."""
        if not has_pictures(trainer, pl_module):
            return
        parts = gather(torch.cat(self.guesses) if self.guesses else torch.empty(0, 4))
        if not trainer.is_global_zero:
            return
        names = trainer.datamodule.class_names
        self.dirpath.mkdir(parents=True, exist_ok=True)
        confusion = pl_module.confusion
        pictures = {"confusion_matrix": draw_confusion(confusion, names)}
        if self.grid:  # a small test may leave rank zero without images
            sample = [prediction for _, prediction in self.sample]
            whose = f"that rank zero of {len(parts)} ranks has tested" if len(parts) > 1 else ""
            pictures["grid"] = draw_grid(self.grid, names)
            self.save(pictures["grid"], "grid", words_of_grid(self.grid, names, whose))
            self.save(draw_grid(sample, names), "sample", words_of_sample(sample, names, whose))
        words = words_of_confusion(confusion, names)
        self.save(pictures["confusion_matrix"], "confusion_matrix", words)
        write_csv(self.dirpath / "per_class.csv", count_classes(confusion, names))
        write_csv(self.dirpath / "guesses.csv", guesses_of(torch.cat(parts), names))
        for logger in trainer.loggers:
            for name, figure in pictures.items():
                log_picture(logger, f"test/{name}", figure, self.dirpath / f"{name}.png")
            if isinstance(logger, WandbLogger):
                log_table(logger, self.table, names)

    def save(self, figure: Figure, name: str, description: str) -> None:
        """Write a picture, and beside it what it shows: the first line is its title."""
        figure.savefig(self.dirpath / f"{name}.png", dpi=120)
        (self.dirpath / f"{name}.txt").write_text(f"{description}\n", encoding="utf-8")


def to_pixels(images: Tensor, mean: list[float], std: list[float]) -> NDArray[np.uint8]:
    """uint8 ``[B, H, W]``, or ``[B, H, W, 3]`` in colour, of normalized ``[B, C, H, W]``."""
    scale, shift = (torch.tensor(each, device=images.device) for each in (std, mean))
    values = (images.float().movedim(1, 3) * scale + shift) * 255
    pixels: NDArray[np.uint8] = values.round().clamp(0, 255).byte().cpu().numpy()
    return pixels[..., :3] if pixels.shape[3] >= 3 else pixels[..., 0]


def draw_grid(predictions: list[Prediction], class_names: list[str]) -> Figure:
    """Images, and under each the guess, the truth in brackets, and the guess's probability."""
    width, height = 8 * 1.36, 0.35 + math.ceil(len(predictions) / 8) * 1.78  # in inches
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(0.08, 0.22, "Test images: guess (truth), probability", fontsize=10)
    for index, p in enumerate(predictions):
        x, y = 0.08 + index % 8 * 1.36, 0.35 + index // 8 * 1.78
        axes.imshow(p.pixels, cmap="gray", vmin=0, vmax=255, extent=(x, x + 1.2, y + 1.2, y))
        guess, truth = class_names[p.guess][:16], class_names[p.truth][:16]
        text = f"{guess}\n({truth})\n{max(p.scores):.1%}"
        color = "#222222" if p.guess == p.truth else "#c1121f"
        style = {"fontsize": 8, "va": "top", "parse_math": False}
        axes.text(x, y + 1.24, text, color=color, **style)  # type: ignore[arg-type]
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


def words_of_grid(predictions: list[Prediction], class_names: list[str], whose: str) -> str:
    """Title and description of the grid: the surest mistakes among the images in ``whose``."""
    mistakes = [p for p in predictions if p.guess != p.truth]
    worst = [
        f"{class_names[p.truth]} taken for {class_names[p.guess]} ({max(p.scores):.1%})"
        for p in mistakes[:WORST]
    ]
    found = f"The surest mistakes are: {', '.join(worst)}." if worst else "There is no mistake."
    return (
        f"Most confident mistakes\n{number_of(predictions, whose)}: guess, truth in brackets and "
        "probability. Mistakes come first, the surest of them before the others: "
        f"{len(mistakes)} of these images. {found}"
    )


def words_of_sample(predictions: list[Prediction], class_names: list[str], whose: str) -> str:
    """Title and description of the sample: each guess."""
    guesses = [
        f"{class_names[p.guess]} ({class_names[p.truth]}, {max(p.scores):.1%})" for p in predictions
    ]
    return (
        f"Random sample\n{number_of(predictions, whose)}. Guesses, with truth and probability in "
        f"brackets: {', '.join(guesses)}."
    )


def number_of(predictions: list[Prediction], whose: str) -> str:
    """Such as ``64 test images``."""
    return f"{len(predictions)} test images {whose}".rstrip()


def words_of_confusion(confusion: Tensor, class_names: list[str]) -> str:
    """Title and description of the confusion matrix: the most frequent mistakes."""
    mistakes = confusion - confusion.diag().diag()
    cells = mistakes.flatten().argsort(descending=True, stable=True)[:WORST].tolist()
    pairs = [(cell // len(class_names), cell % len(class_names)) for cell in cells]
    frequent = [
        f"{class_names[row]} taken for {class_names[column]} ({int(mistakes[row, column])})"
        for row, column in pairs
        if mistakes[row, column]
    ]
    right, total = int(confusion.diag().sum()), int(confusion.sum())
    found = f"The most frequent mistakes are: {', '.join(frequent)}." if frequent else ""
    return f"Confusion matrix\n{right} of {total} test images are right. {found}".rstrip()


def count_classes(confusion: Tensor, class_names: list[str]) -> list[list[object]]:
    """For each class its test images, the share that was found, and how often its guess is true."""
    found = confusion.diag() / confusion.sum(1)
    true = confusion.diag() / confusion.sum(0)
    rows: list[list[object]] = [["class", "test images", "found (recall)", "right (precision)"]]
    for index, name in enumerate(class_names):
        # A class without images, or without guesses, has no share.
        shares = ["" if x.isnan() else f"{x:.4f}" for x in (found[index], true[index])]
        rows.append([name, int(confusion[index].sum()), *shares])
    return rows


def guesses_of(rows: Tensor, class_names: list[str]) -> list[list[object]]:
    """The lines of ``guesses.csv`` in order of the ids, of rows ``[N, 4]`` in any order."""
    lines: list[list[object]] = [["id", "truth", "guess", "probability"]]
    for id_, truth, guess, probability in rows[rows[:, 0].argsort()].tolist():
        names = class_names[int(truth)], class_names[int(guess)]
        lines.append([int(id_), *names, f"{probability:.6f}"])
    return lines


def write_csv(path: Path, rows: list[list[object]]) -> None:
    """Write a table, the heading first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def log_table(logger: WandbLogger, table: list[Prediction], class_names: list[str]) -> None:
    """Log ``test/predictions``: id, image, guess, truth and the score of each class."""
    import wandb

    columns = ["id", "image", "guess", "truth", *(f"score_{name}" for name in class_names)]
    rows = [
        [p.id, wandb.Image(p.pixels), class_names[p.guess], class_names[p.truth], *p.scores]
        for p in table
    ]
    logger.log_table("test/predictions", columns=columns, data=rows)
