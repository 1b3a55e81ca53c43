"""Predictions to look at: a grid of test images, a confusion matrix, and a table for W&B."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import WandbLogger
from numpy.typing import NDArray
from torch import Tensor

from project.loader import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRID_IMAGES = 64  # at most


class Prediction(NamedTuple):
    """What the model says of one image."""

    id: int
    pixels: NDArray[np.uint8]
    """``[H, W]``, or ``[H, W, 3]`` in colour."""
    guess: int
    truth: int
    scores: list[float]
    """Probability of each class."""


class Predictions(L.Callback):
    """Leaves test predictions to look at, on rank zero.

    Writes ``grid.png``: rank zero's mistakes, surest first, then images it got right; and
    ``confusion_matrix.png``: the images of all ranks, counted. Logs the table
    ``test/predictions`` if there is a W&B logger.

    Args:
        dirpath: where the pictures go.
        num_batches_to_log: test batches of which images are in the table.
        images_per_batch: images of each of them, from its start.
    """

    def __init__(self, dirpath: str, num_batches_to_log: int, images_per_batch: int) -> None:
        self.dirpath = Path(dirpath)
        self.num_batches_to_log = num_batches_to_log
        self.images_per_batch = images_per_batch

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the test before."""
        self.table: list[Prediction] = []
        self.grid: list[Prediction] = []

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep what the table and the grid will show."""
        if not trainer.is_global_zero:
            return
        guesses, scores = outputs.argmax(1).cpu(), outputs.float().softmax(1).cpu()
        num_first = self.images_per_batch if batch_idx < self.num_batches_to_log else 0
        first = torch.arange(len(guesses))[:num_first]
        sureness = scores.amax(1).where(guesses != batch.labels.cpu(), -1.0)  # of a mistake
        for_grid = sureness.argsort(descending=True, stable=True)[:GRID_IMAGES]
        chosen = torch.cat([first, for_grid])
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        pixels = to_pixels(batch.images[chosen], data.mean, data.std)
        columns = batch.ids[chosen], pixels, guesses[chosen], batch.labels[chosen], scores[chosen]
        rows = [
            Prediction(int(id_), image.numpy(), int(guess), int(truth), row.tolist())
            for id_, image, guess, truth, row in zip(*(c.cpu() for c in columns), strict=True)
        ]
        self.table += rows[: len(first)]
        mistakes_first = sorted(
            self.grid + rows[len(first) :], key=lambda p: p.guess == p.truth or -max(p.scores)
        )
        self.grid = mistakes_first[:GRID_IMAGES]

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the pictures and log the table."""
        if not trainer.is_global_zero:
            return
        module: Any = pl_module
        names = trainer.datamodule.class_names  # type: ignore[attr-defined]
        self.dirpath.mkdir(parents=True, exist_ok=True)
        if self.grid:  # a small test may leave rank zero without images
            save(draw_grid(self.grid, names), self.dirpath / "grid.png")
        save(draw_confusion(module.confusion, names), self.dirpath / "confusion_matrix.png")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                log_table(logger, self.table, names)


def to_pixels(images: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """uint8 ``[B, H, W]``, or ``[B, H, W, 3]`` in colour, of normalized ``[B, C, H, W]``."""
    scale, shift = (torch.tensor(values, device=images.device) for values in (std, mean))
    pixels = images.float().movedim(1, 3) * scale + shift
    pixels = (pixels * 255).round().clamp(0, 255).byte()
    return pixels[..., :3] if pixels.shape[3] >= 3 else pixels[..., 0]


def draw_grid(predictions: list[Prediction], class_names: list[str]) -> "Figure":
    """Images, and under each the guess, the truth in brackets, and the guess's probability."""
    from matplotlib.figure import Figure

    columns = min(8, len(predictions))
    names = [(short(class_names[p.guess]), short(class_names[p.truth])) for p in predictions]
    between = " " if all(len(guess + truth) < 15 for guess, truth in names) else "\n"
    size, margin, line, top = 1.2, 0.08, 0.15, 0.35  # of one image and around it, in inches
    across, down = size + 2 * margin, size + margin + (2.4 if between == " " else 3.4) * line
    width = max(columns * across, 3.5)
    height = top + math.ceil(len(predictions) / columns) * down
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))  # in inches
    axes.set_axis_off()
    axes.text(margin, 0.22, "Test images: guess (truth), mistakes first", fontsize=10)
    for index, (p, (guess, truth)) in enumerate(zip(predictions, names, strict=True)):
        x, y = index % columns * across + margin, top + index // columns * down
        axes.imshow(p.pixels, cmap="gray", vmin=0, vmax=255, extent=(x, x + size, y + size, y))
        text = f"{guess}{between}({truth})\n{max(p.scores):.1%}"
        color = "#222222" if p.guess == p.truth else "#c1121f"
        style = {"fontsize": 8, "va": "top", "parse_math": False}
        axes.text(x, y + size + 0.3 * line, text, color=color, **style)  # type: ignore[arg-type]
    return figure


def draw_confusion(confusion: Tensor, class_names: list[str]) -> "Figure":
    """Counts ``[num_classes, num_classes]`` by truth and guess, coloured by share of the truth."""
    from matplotlib.figure import Figure

    num_classes = len(class_names)
    side = min(max(0.42 * num_classes, 2.5), 10)  # of the matrix, in inches
    figure = Figure(figsize=(side + 1.6, side + 1.6), layout="constrained")
    axes = figure.add_subplot(xlabel="guess", ylabel="truth")
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares.sqrt().numpy(), cmap="Blues", vmin=0, vmax=1)  # the root shows few mistakes
    ticks = range(0, num_classes, math.ceil(num_classes / 100))
    names, fontsize = [short(class_names[tick]) for tick in ticks], 9 if num_classes <= 20 else 5
    rotation = 90 if max(map(len, names)) * num_classes > 60 else 0
    axes.set_xticks(ticks, names, fontsize=fontsize, rotation=rotation, parse_math=False)
    axes.set_yticks(ticks, names, fontsize=fontsize, parse_math=False)
    if num_classes <= 20:
        for (row, column), count in np.ndenumerate(confusion.numpy()):
            color = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, count or "", color=color, ha="center", va="center", fontsize=8)
    right, total = int(confusion.diag().sum()), int(confusion.sum())
    axes.set_title(f"{right / max(total, 1):.2%} of {total} test images right", fontsize=10)
    return figure


def short(name: str) -> str:
    """A name that fits under an image."""
    return name if len(name) <= 16 else f"{name[:14]}..."


def save(figure: "Figure", path: Path) -> None:
    """Write a PNG, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)


def log_table(logger: WandbLogger, table: list[Prediction], class_names: list[str]) -> None:
    """Log ``test/predictions``: id, image, guess, truth and the score of each class."""
    import wandb

    columns = ["id", "image", "guess", "truth", *(f"score_{name}" for name in class_names)]
    rows = [
        [p.id, wandb.Image(p.pixels), class_names[p.guess], class_names[p.truth], *p.scores]
        for p in table
    ]
    logger.log_table("test/predictions", columns=columns, data=rows)
