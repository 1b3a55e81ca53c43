"""Name what is in image files, or in all images of directories.

python scripts/predict.py run=runs/digits-cnn-3f2a1b seven.png
python scripts/predict.py run=runs/digits-cnn-3f2a1b top=3 format=json photos/
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from options import run_script

from samestep.errors import ConfigError

BATCH_SIZE = 64  # files decoded and predicted at once

Guesses = list[tuple[str, float]]
"""All classes with their probabilities, the likeliest first."""


def main(model: Any, data: Any, options: dict[str, Any]) -> int:
    """Print the likeliest classes of each file; those that cannot be read go to stderr.

    Returns:
        0, or 1 if a file could not be read.
    """
    import torch  # once the words are checked

    top, accelerator, as_json = options["top"], options["accelerator"], options["format"] == "json"
    if top > model.num_classes:
        raise ConfigError(f"top={top}: must not exceed the {model.num_classes} classes of the run")
    if accelerator == "gpu" and not torch.accelerator.is_available():
        raise ConfigError("accelerator=gpu: this machine has none; auto takes the CPU then")
    if accelerator != "cpu" and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    exit_code = 0
    objects, rows = [], [["file", *["class", "probability"] * top]]
    for file, result in predict(model, data, images_in(options["files"])):
        if isinstance(result, Exception):
            print(f"error: {result}", file=sys.stderr)
            exit_code = 1
            continue
        best = result[:top]
        guesses = [{"class": name, "probability": round(p, 6)} for name, p in best]
        objects.append({"file": str(file), "guesses": guesses})
        rows.append([str(file), *(cell for name, p in best for cell in (name, f"{p:.4f}"))])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]  # nothing is cut off
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    print(json.dumps(objects, indent=2) if as_json else "\n".join(lines))
    return exit_code


def images_in(names: Sequence[str]) -> list[Path]:
    """The files named, and all images in and below the directories named."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    files = []
    for path in map(Path, names):
        found = [path]
        if path.is_dir():
            found = sorted(f for f in path.rglob("*") if f.suffix.lower() in IMG_EXTENSIONS)
        if not found:
            raise ConfigError(f"{path}: holds no images; they end in {', '.join(IMG_EXTENSIONS)}")
        files += found
    return files


def predict(
    model: Any, data: Any, files: Sequence[Path]
) -> Iterator[tuple[Path, Guesses | Exception]]:
    """Each file, and its guesses or why it cannot be read. Images are prepared as for training."""
    import torch

    from project.data.sources import DataError, read_image

    for start in range(0, len(files), BATCH_SIZE):
        images = {}
        for file in files[start : start + BATCH_SIZE]:
            try:
                images[file] = read_image(file, data.num_channels, data.image_size)
            except DataError as error:
                yield file, error
        if images:
            with torch.inference_mode():
                batch = torch.stack([*images.values()]).to(model.device)
                batch = data.normalize.to(model.device)(batch)
                best = model(batch).softmax(1).cpu().sort(dim=1, descending=True)
            for file, values, ids in zip(images, best.values, best.indices, strict=True):
                names = [data.class_names[i] for i in ids.tolist()]
                yield file, list(zip(names, values.tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(run_script("predict", __doc__, main))
