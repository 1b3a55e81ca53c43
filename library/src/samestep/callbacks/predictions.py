"""What a model says of the test samples, as tables from which the report draws.

Needs Pillow, where the samples are images. The core does not import this file: a program or a
configuration names it.
"""

import base64
import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor

from samestep.ranks import virtual
from samestep.ranks.process_group import gather

Mistake = tuple[list[float], Tensor]  # a row of the guesses, and an image [1 or 3, H, W]

FILES = (
    "guesses.csv", "guesses.txt", "confusion_matrix.csv", "confusion_matrix.txt", "grid.csv",
    "grid.txt",
)  # fmt: skip
GRID_IMAGES = 64  # at most
IMAGE_SIZE = 96  # pixels of the longer side, at most: larger ones would fill the report
NUM_MISTAKES = 5  # in words
GUESSES = "All guesses\nA row for each test sample, in the order of the data set."
GRID = "Most confident mistakes\n{} test images of rank zero, surest first."
WANDB_ROWS = 10_000  # of the table of guesses in W&B, at most


class Predictions(L.Callback):
    """Leaves tables of the test predictions of a classifier, on rank zero.

    ``test_step`` returns a dictionary of columns: ``truth``, int64 ``[B]``, the right classes;
    ``probability`` ``[B, C]``, a score of each class; and ``image``, uint8 ``[B, 1 or 3, H, W]``,
    if the samples are images. A test that returns anything else leaves nothing. The classes are
    called as ``class_names`` of the DataModule says, otherwise by their numbers.

    Writes into ``dirpath``, where ``report.html`` finds them, and removes those of an earlier test:

    - ``guesses.csv``: a row for each sample of all ranks, with a column for the score of each
      class. The order is that of the data set on any number of ranks, if a ``BatchLoader`` reads
      them. With ``split_batches``, a batch of fewer samples than ranks has its first one again.
    - ``confusion_matrix.csv``: the samples of all ranks, counted by class and guess.
    - ``grid.csv``: the 64 most confident mistakes of rank zero at most, as images of 96 pixels at
      most; absent without images or mistakes.
    - ``guesses.txt`` and so on: title and description of each table.

    W&B gets the first 10,000 guesses as a table, ``test/predictions``, the matrix as a table,
    ``test/confusion_matrix``, and the mistakes as images, ``test/grid``; TensorBoard gets the
    images, and MLflow the tables as files.

    Args:
        dirpath: folder of the tables.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = Path(dirpath)

    def on_test_start(self, *_: Any) -> None:
        """Forget the test before."""
        # Of this rank: where a slice stands, and [B, 3 + C], the columns of guesses.csv.
        self.batches: list[tuple[tuple[int, int, int], Tensor]] = []
        self.mistakes: list[Mistake] = []  # surest first

    def on_test_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep all guesses, and the images that the grid will show."""
        match outputs:
            case {"truth": Tensor(ndim=1) as truth, "probability": Tensor(ndim=2) as scores}:
                probability, guess = scores.float().max(dim=1, keepdim=True)
                rows = torch.cat([truth[:, None], guess, probability, scores], dim=1).float().cpu()
                self.batches.append(((dataloader_idx, batch_idx, virtual.current()), rows))
                if trainer.is_global_zero:
                    self.keep_mistakes(rows, outputs.get("image", truth[:0]))

    def keep_mistakes(self, rows: Tensor, images: Tensor) -> None:
        """Keep the images of the mistakes of which the model is most certain."""
        rows = rows[: len(images)]  # none, if the samples are no images
        wrong = (rows[:, 0] != rows[:, 1]).nonzero()[:, 0]
        chosen = wrong[rows[wrong, 2].argsort(descending=True, stable=True)[:GRID_IMAGES]]
        self.mistakes += zip(rows[chosen].tolist(), images[chosen].cpu(), strict=True)
        self.mistakes.sort(key=lambda mistake: -mistake[0][2])
        del self.mistakes[GRID_IMAGES:]

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the tables; every rank must call this."""
        # Each batch is cut into contiguous slices.
        slices = sorted(chain.from_iterable(gather(self.batches)), key=lambda slice_: slice_[0])
        rows = torch.cat([torch.empty(0), *(rows for _, rows in slices)])
        mistakes = self.mistakes
        # A checkpoint that is saved later must not hold them.
        self.on_test_start()
        if not trainer.is_global_zero:
            return
        for name in FILES:
            (self.dirpath / name).unlink(missing_ok=True)
        if len(rows):
            self.dirpath.mkdir(parents=True, exist_ok=True)
            self.write(trainer, rows, mistakes)

    def write(self, trainer: Any, rows: Tensor, mistakes: Sequence[Mistake]) -> None:
        """Write the tables of ``rows`` ``[N, 3 + C]``, and show them in the trackers."""
        num_classes = rows.shape[1] - 3
        given = getattr(trainer.datamodule, "class_names", None) or ()
        # What has no name is called by its number.
        names = [*map(str, [*given, *range(len(given), num_classes)])][:num_classes]
        confusion = count_confusion(rows, names)
        paths = [
            self.save("guesses", name_guesses(rows, names), GUESSES),
            self.save("confusion_matrix", confusion, describe_confusion(rows, names)),
        ]
        pictures = []
        captions = []
        tiles = [["picture", "guess", "truth", "probability"]]
        for (truth, guess, probability, *_), image in mistakes:
            words = [names[int(guess)], names[int(truth)], f"{probability:.1%}"]
            pictures.append(make_picture(image))
            captions.append("guess {}, truth {}, probability {}".format(*words))
            tiles.append([address_of(pictures[-1]), *words])
        if pictures:
            paths.append(self.save("grid", tiles, GRID.format(len(pictures))))
        for logger in trainer.loggers:
            match logger:
                case WandbLogger():
                    heading, *guesses = islice(name_guesses(rows, names), WANDB_ROWS + 1)
                    logger.log_table("test/predictions", heading, guesses)
                    logger.log_table("test/confusion_matrix", confusion[0], confusion[1:])
                    logger.log_image("test/grid", pictures, caption=captions)
                case TensorBoardLogger():
                    for place, picture in enumerate(pictures):
                        name = f"test/grid/{place + 1:02}: {captions[place]}"
                        logger.experiment.add_image(name, np.asarray(picture), dataformats="HWC")
                case MLFlowLogger():
                    for path in paths:
                        logger.experiment.log_artifact(logger.run_id, str(path), "test")

    def save(self, name: str, table: Iterable[Sequence[Any]], words: str) -> Path:
        """Write a table, heading first, and beside it its title and description."""
        path = self.dirpath / f"{name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
        path.with_suffix(".txt").write_text(f"{words}\n", encoding="utf-8")
        return path


def name_guesses(rows: Tensor, names: Sequence[str]) -> Iterator[list[Any]]:
    """The lines of ``guesses.csv``, heading first."""
    yield ["id", "truth", "guess", "probability", *names]
    # Row by row: as Python's numbers, all scores of a large test set would fill the memory.
    for number, row in enumerate(rows):
        truth, guess, *scores = row.double().round(decimals=6).tolist()
        yield [number, names[int(truth)], names[int(guess)], *scores]


def count_confusion(rows: Tensor, names: Sequence[str]) -> list[list[Any]]:
    """The lines of ``confusion_matrix.csv``, heading first: how often each class was guessed."""
    num_classes = len(names)
    truths, guesses = rows[:, :2].long().T
    cells = (truths * num_classes + guesses).bincount(minlength=num_classes**2)
    counts = cells.view(num_classes, num_classes).tolist()
    lines = [[name, *row] for name, row in zip(names, counts, strict=True)]
    return [["truth / guess", *names], *lines]


def describe_confusion(rows: Tensor, names: Sequence[str]) -> str:
    """How many samples are right, and which classes are mistaken for which most often."""
    wrong = rows[rows[:, 0] != rows[:, 1], :2].long().tolist()
    frequent = []
    for (truth, guess), count in Counter(map(tuple, wrong)).most_common(NUM_MISTAKES):
        frequent.append(f"{names[truth]} taken for {names[guess]} ({count})")
    return (
        f"Confusion matrix\n{len(rows) - len(wrong)} of {len(rows)} test samples are right. "
        f"The most frequent mistakes: {', '.join(frequent) or 'none'}."
    )


def make_picture(image: Tensor) -> Any:
    """A small picture in colour of an image ``[1 or 3, H, W]``."""
    from PIL import Image

    # Of one channel there are three copies: grey.
    pixels = image.repeat(3, 1, 1)[:3].movedim(0, 2)
    picture = Image.fromarray(pixels.numpy())
    picture.thumbnail((IMAGE_SIZE, IMAGE_SIZE))
    return picture


def address_of(picture: Any) -> str:
    """The content of a picture as an address, which a page can show without another file."""
    content = io.BytesIO()
    picture.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
