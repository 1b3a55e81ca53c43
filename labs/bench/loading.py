"""The way of images into a batch: the input pipeline alone, and JPEGs from a folder."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from labs.bench.workloads import configure

SIZE = 224
BATCH = 28


def per_image(one_pass: Callable[[], int], passes: int = 4) -> dict[str, float]:
    """Seconds for an image: the median of some passes, after one that does not count."""
    one_pass()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        count = one_pass()
        seconds.append((time.perf_counter() - start) / count)
    return {"value": median(seconds)}


def memory() -> dict[str, float]:
    """Gather, crop, flip, normalize: what a training step waits for, in us."""
    from samestep.hydra import build

    cfg = configure("cifar")
    data, normalize = build.build_datamodule(cfg), build.build_model(cfg)
    normalize.net = nn.Identity()
    data.setup("fit")
    loader = data.train_dataloader()

    def one_pass() -> int:
        return sum(len(normalize(images)) for images, _ in loader)

    return {"value": 1e6 * per_image(one_pass)["value"]}


def write_photos(folder: Path) -> None:
    """320 JPEGs of 500 x 375 pixels, 300 of them for training, in two classes."""
    rng = np.random.default_rng(0)
    for number in range(320):
        path = folder / "photos" / ("train" if number < 300 else "test") / "ab"[number % 2]
        path.mkdir(parents=True, exist_ok=True)
        rough = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(rough.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = smooth + rng.normal(0, 12, (375, 500, 1)).astype(np.int16)
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        image.save(path / f"{number}.jpg", quality=90)


def folder(folder: str) -> dict[str, float]:
    """data=folder with one loader process, as training reads it."""
    from samestep.hydra import build
    from samestep.hydra.compose import check

    words = [
        "data=folder", f"data.root={folder}/photos", "data.num_classes=2", "data.num_val=4",
        f"data.image_size={SIZE}", "data.num_workers=1", f"data.global_batch_size={BATCH}",
    ]  # fmt: skip
    data = build.build_datamodule(check(words))
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    return per_image(lambda: sum(len(images) for images, _ in loader))


def with_pillow(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.draft("RGB", (SIZE, SIZE))
    return image.convert("RGB")


def with_torchvision(content: bytes) -> Image.Image:
    from torchvision import io as vision

    data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    pixels = vision.decode_jpeg(data, vision.ImageReadMode.RGB)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


DECODERS = {"pillow": with_pillow, "torchvision": with_torchvision}


def decode(folder: str, decoder: str) -> dict[str, float]:
    """A bare loop over the files with one decoder, into batches as the loader makes them."""
    paths = sorted(Path(folder, "photos", "train").rglob("*.jpg"))

    def one_pass() -> int:
        for begin in range(0, len(paths), BATCH):
            batch = torch.empty(BATCH, 3, SIZE, SIZE, dtype=torch.uint8)
            for image, path in zip(batch, paths[begin:], strict=False):
                decoded = DECODERS[decoder](path.read_bytes())
                pixels = np.array(ImageOps.fit(decoded, (SIZE, SIZE), Image.Resampling.BILINEAR))
                image.copy_(torch.from_numpy(pixels).permute(2, 0, 1))
        return len(paths)

    return per_image(one_pass)
