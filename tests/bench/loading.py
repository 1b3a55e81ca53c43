"""The way of images into a batch: the input pipeline alone, and JPEGs from a folder.

python -m tests.bench.loading pillow FOLDER      # one contender, in this process
"""

import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from tests.bench import recipes
from tests.bench.measure import PYTHON, Claim, Row, say

SIZE = 224


def timed(one_pass: Callable[[], int]) -> float:
    """Seconds per image: the median of four passes, after one that does not count."""
    one_pass()
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        count = one_pass()
        seconds.append((time.perf_counter() - start) / count)
    return median(seconds)


def ours_in_memory(folder: Path) -> float:
    """Gather, crop, flip, normalize: what a training step waits for."""
    from samestep import build
    from samestep.config.compose import check

    cfg = check(recipes.overrides("cifar", folder))
    data = build.datamodule(cfg)
    data.prepare_data()
    data.setup("fit")
    loader, device = data.train_dataloader(), torch.device("cpu")

    def one_pass() -> int:
        count = 0
        for raw, place in loader:
            images = data.augment(raw.images.to(device), place)
            count += len(data.normalize(images))
        return count

    return timed(one_pass)


def ours_folder(folder: Path) -> float:
    """data=folder with one loader process, as training reads it."""
    from samestep import build
    from samestep.config.compose import check

    words = ["data=folder", f"data.root={folder}/photos", "data.num_classes=2", "data.num_val=4",
             f"data.image_size={SIZE}", "data.num_workers=1", "data.global_batch_size=28",
    ]  # fmt: skip
    data = build.datamodule(check(words))
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    return timed(lambda: sum(len(raw.images) for raw, _ in loader))


def fit(image: Image.Image) -> np.ndarray:
    return np.asarray(ImageOps.fit(image, (SIZE, SIZE), Image.Resampling.BILINEAR))


def with_pillow(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as file:
        file.draft("RGB", (SIZE, SIZE))
        return fit(file.convert("RGB"))


def with_simplejpeg(content: bytes) -> np.ndarray:
    import simplejpeg

    pixels = simplejpeg.decode_jpeg(content, "RGB", min_height=SIZE, min_width=SIZE)
    return fit(Image.fromarray(pixels))


def with_torchvision(content: bytes) -> np.ndarray:
    from torchvision import io as vision

    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    pixels = vision.decode_jpeg(data, vision.ImageReadMode.RGB)
    return fit(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))


def decode_all(decoder: Callable[[bytes], np.ndarray]) -> Callable[[Path], float]:
    """A bare loop over the files with one decoder."""

    def run(folder: Path) -> float:
        paths = sorted((folder / "photos" / "train").rglob("*.jpg"))
        return timed(lambda: sum(len(decoder(path.read_bytes())[None]) for path in paths))

    return run


CONTENDERS: dict[str, Callable[[Path], float]] = {
    "ours": ours_in_memory, "folder": ours_folder,
    "pillow": decode_all(with_pillow), "simplejpeg": decode_all(with_simplejpeg),
    "torchvision": decode_all(with_torchvision),
}  # fmt: skip


def rows(folder: Path) -> Iterator[Row]:
    def commands(*names: str) -> dict[str, list[str]]:
        words = ["-m", "tests.bench.loading"]
        return {name: [PYTHON, *words, name, str(folder)] for name in names}

    yield Row(
        "pipeline", "input pipeline: CIFAR crop, flip, normalize", commands("ours"),
        [Claim("<= 20 us per image and core", "ours", None, 20, scale=1e6, unit=" us")],
        lambda: recipes.write_tensors("cifar", folder),
    )  # fmt: skip
    yield Row(
        "jpeg", "JPEGs of 500 px to 224 px",
        commands("simplejpeg", "folder", "pillow", "torchvision"),
        [Claim("images/s of data=folder / loop over simplejpeg >= 0.9", "simplejpeg", "folder",
               0.9, at_least=True),
         Claim("Pillow / simplejpeg", "pillow", "simplejpeg"),
         Claim("torchvision.io / simplejpeg", "torchvision", "simplejpeg")],
        lambda: recipes.write_photos(folder),
    )  # fmt: skip


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    result: Any = CONTENDERS[name](folder)
    say(seconds=result)


if __name__ == "__main__":
    main()
