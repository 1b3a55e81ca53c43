"""The way of images into a batch: the input pipeline alone, and JPEGs from a folder."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image, ImageOps

from tests.bench import sets

SIZE = 224


def timed(one_pass: Callable[[], int]) -> dict[str, float]:
    """Seconds per image: the median of four passes, after one that does not count."""
    one_pass()
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        count = one_pass()
        seconds.append((time.perf_counter() - start) / count)
    return {"value": median(seconds)}


def memory(folder: str) -> dict[str, float]:
    """Gather, crop, flip, normalize: what a training step waits for, in us."""
    from samestep import build
    from samestep.config.compose import check

    cfg = check(sets.overrides("cifar", Path(folder)))
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

    return {"value": 1e6 * timed(one_pass)["value"]}


def folder(folder: str) -> dict[str, float]:
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


def decode_all(folder: str, decoder: Callable[[bytes], np.ndarray]) -> dict[str, float]:
    """A bare loop over the files with one decoder."""
    paths = sorted(Path(folder, "photos", "train").rglob("*.jpg"))
    return timed(lambda: sum(len(decoder(path.read_bytes())[None]) for path in paths))


def pillow(folder: str) -> dict[str, float]:
    return decode_all(folder, with_pillow)


def simplejpeg(folder: str) -> dict[str, float]:
    return decode_all(folder, with_simplejpeg)


def torchvision(folder: str) -> dict[str, float]:
    return decode_all(folder, with_torchvision)
