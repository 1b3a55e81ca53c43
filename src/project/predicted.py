"""The guesses of several runs for the same test images: which ones have changed."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from project.saved_run import build_data, read_saved_group
from samestep.errors import ConfigError, RunError
from samestep.report.compare import Gallery
from samestep.report.files import data_address

MAX_PICTURES = 60  # of one pair of runs
SIDE = 96  # pixels of a picture on the page, at least


class Guess(NamedTuple):
    """What a run has guessed for one test image."""

    truth: str
    guess: str
    probability: float

    def __str__(self) -> str:
        """Such as ``7 (97.8%)``."""
        return f"{self.guess} ({self.probability:.1%})"


class Change(NamedTuple):
    """A test image for which two runs have guessed differently."""

    id: int
    first: Guess
    other: Guess

    def __str__(self) -> str:
        """Such as ``12: 8, guessed 7 (97.8%), then 8 (60.2%)``."""
        return f"{self.id}: {self.first.truth}, guessed {self.first}, then {self.other}"


def read_guesses(run_dir: Path) -> dict[int, Guess]:
    """The lines of ``predictions/guesses.csv`` by their ids.

    Raises:
        RunError: if the file is absent or damaged.
    """
    path = run_dir / "predictions" / "guesses.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {
                int(row["id"]): Guess(row["truth"], row["guess"], float(row["probability"]))
                for row in csv.DictReader(file)
            }
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is damaged ({error!r})"
        raise RunError(f"{path} cannot be read: {why}") from error


def find_changes(first: Path, other: Path) -> tuple[list[Change], int]:
    """The images that two runs guess differently, and how many images both have seen.

    Raises:
        RunError: if the runs have no predictions, or were tested on other images.
    """
    one, two = read_guesses(first), read_guesses(other)
    common = sorted(one.keys() & two.keys())
    if not common or any(one[id_].truth != two[id_].truth for id_ in common):
        raise RunError(f"{first.name} and {other.name} were not tested on the same images")
    changes = [Change(n, one[n], two[n]) for n in common if one[n].guess != two[n].guess]
    return changes, len(common)


def galleries(run_dirs: Sequence[Path]) -> list[Gallery]:
    """A gallery for each run after the first one: the images it guesses differently."""
    first, *others = run_dirs
    return [_gallery(first, other) for other in others]


def _gallery(first: Path, other: Path) -> Gallery:
    title = f"Predictions of {other.name} that differ from {first.name}"
    try:
        changes, num = find_changes(first, other)
    except RunError as error:
        return Gallery(title, f"{error}.", [])
    now_right = sum(change.other.guess == change.other.truth for change in changes)
    now_wrong = sum(change.first.guess == change.first.truth for change in changes)
    text = (
        f"{len(changes)} of {num} test images: {now_right} are right only in {other.name}, "
        f"{now_wrong} only in {first.name}."
    )
    shown = changes[:MAX_PICTURES]
    if len(shown) < len(changes):
        text += f" The first {MAX_PICTURES} are shown."
    try:
        pictures = draw(first, [change.id for change in shown])
    except (ConfigError, RunError, OSError) as error:
        text += f" Without pictures, because the images cannot be read: {error}"
        pictures = [""] * len(shown)
    return Gallery(title, text, list(zip(pictures, map(str, shown), strict=True)))


def draw(run_dir: Path, ids: Sequence[int]) -> list[str]:
    """The test images of these ids as PNG addresses, read where the run found its data.

    Raises:
        ConfigError, RunError: if the data are not there.
    """
    if not ids:
        return []
    data = build_data(read_saved_group(run_dir, "data"))
    data.prepare_data()
    data.setup("test")
    images = data.test_set[torch.tensor(ids)].images.movedim(1, 3)  # [B, H, W, C]
    return [_address(image) for image in images]


def _address(pixels: torch.Tensor) -> str:
    """A PNG of uint8 ``[H, W, C]``, enlarged by a whole number if it is small."""
    array = pixels[..., :3].numpy() if pixels.shape[2] >= 3 else pixels[..., 0].numpy()
    image = Image.fromarray(array)
    factor = max(1, SIDE // max(image.size))
    enlarged = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    file = io.BytesIO()
    enlarged.save(file, format="PNG", optimize=True)
    return data_address(file.getvalue(), "image.png")
