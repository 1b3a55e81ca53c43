"""Name the class of image files with the model of a run."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from project.data.datamodule import ImageDataModule
from project.data.download import DataError
from project.data.sources import read_image
from project.model.classifier import ImageClassifier
from samestep.errors import ConfigError

BATCH_SIZE = 64  # files decoded and predicted at once

Guesses = list[tuple[str, float]]
"""Classes with their probabilities, the most likely first."""


def find_images(names: Sequence[str]) -> list[Path]:
    """The named files, and all images in and below the named directories.

    Raises:
        ConfigError: if a directory holds no images.
    """
    files = []
    for path in map(Path, names):
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
        if not found:
            raise ConfigError(f"{path}: holds no images; they end in {', '.join(IMG_EXTENSIONS)}")
        files += found
    return files


def predict_files(
    model: ImageClassifier, data: ImageDataModule, files: Sequence[Path]
) -> Iterator[tuple[Path, Guesses | DataError]]:
    """Yield each file with its guesses, or with the reason why it cannot be read.

    The images are prepared as those of ``data=folder`` are. The model stays on its device.
    """
    for start in range(0, len(files), BATCH_SIZE):
        found = {}
        for file in files[start : start + BATCH_SIZE]:
            try:
                found[file] = read_image(file, data.num_channels, data.image_size)
            except DataError as error:
                yield file, error
        if not found:
            continue
        with torch.inference_mode():
            images = torch.stack([*found.values()]).to(model.device)
            # A run may have been trained in 64 bits.
            normalized = data.normalize.to(model.device)(images).to(model.dtype)
            probabilities = model(normalized).softmax(1).cpu()
        for file, row in zip(found, probabilities, strict=True):
            values, ids = row.sort(descending=True)
            names = [data.class_names[index] for index in ids.tolist()]
            yield file, list(zip(names, values.tolist(), strict=True))


def print_guesses(
    model: ImageClassifier, data: ImageDataModule, files: Sequence[Path], top: int, as_json: bool
) -> int:
    """Print the ``top`` most likely classes of each file.

    Returns:
        0, or 1 if a file could not be read. It is named on stderr, and the others are predicted.

    Raises:
        ConfigError: if the run has fewer classes than ``top``.
    """
    if top > model.num_classes:
        raise ConfigError(
            f"--top {top}: must not exceed the {model.num_classes} classes of the run"
        )
    exit_code, objects = 0, []
    rows = [["file", *["class", "probability"] * top]]
    for file, result in predict_files(model, data, files):
        if isinstance(result, DataError):
            print(f"error: {result}", file=sys.stderr)
            exit_code = 1
            continue
        best = result[:top]
        guesses = [{"class": name, "probability": round(value, 6)} for name, value in best]
        objects.append({"file": str(file), "guesses": guesses})
        rows.append([str(file), *(text for name, p in best for text in (name, f"{p:.4f}"))])
    if as_json:
        print(json.dumps(objects, indent=2))
    else:  # each column is as wide as its longest text
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))
    return exit_code


def main(model: Any, data: Any, names: Sequence[str], top: int, form: str, accelerator: str) -> int:
    """Find the files, move the model to the device, and print the guesses; see above."""
    if not names:
        raise ConfigError("there is nothing to predict; name image files, or directories of them")
    files = find_images(names)
    has_accelerator = torch.accelerator.is_available()
    if accelerator == "gpu" and not has_accelerator:
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if accelerator != "cpu" and has_accelerator:
        model.to(torch.accelerator.current_accelerator())
    return print_guesses(model, data, files, top, form == "json")
