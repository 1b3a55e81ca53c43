"""One epoch of MNIST in train.py's way against a bare PyTorch loop, side by side.

python -m tests.benchmark                 # 3 rounds of 3 epochs each, in turn, on one CPU thread
python -m tests.benchmark --rounds 5 --threads 2

Both train the same MLP of 68 k parameters on 55,000 images (and validate it on 5,000) in MNIST's
file format, batch 128, Adam. Our epoch has everything on: validation, metrics.csv, two
checkpoints, progress. The bare loop holds its tensors in memory and does nothing else. The
images are random: speed does not depend on what they show.
"""

import argparse
import tempfile
import time
from hashlib import md5
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.nn import functional as F

from samestep import build
from samestep.config.compose import check
from samestep.ranks import process
from samestep.run.history import History

EPOCHS = 3
BATCH_SIZE = 128


class EpochTimer(L.Callback):
    """Wall-clock seconds from the start of each epoch to the start of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())


def write_mnist(root: Path) -> list[str]:
    """Write 60,000 + 10,000 random images as MNIST does; return overrides with their checksums."""
    rng = np.random.default_rng(0)
    overrides = [f"data.root={root}"]
    (root / "mnist").mkdir(parents=True)
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        for name, magic, array in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            header = np.array([magic, *array.shape], dtype=">i4").tobytes()
            content = header + array.tobytes()
            (root / "mnist" / f"{split}-{name}-ubyte").write_bytes(content)
            digest = md5(content, usedforsecurity=False).hexdigest()
            overrides.append(f"data.source.files.{split}-{name}-ubyte='{digest}'")
    return overrides


def ours(overrides: list[str], run_root: Path, name: str) -> list[float]:
    """Seconds per epoch of a run with everything on."""
    cfg = check([*overrides, f"run_root={run_root}", f"run_id={name}"])
    model, datamodule = build.model(cfg), build.datamodule(cfg)
    Path(cfg.run_dir).mkdir(parents=True)
    trainer, timer = build.trainer(cfg, History(cfg.run_dir)), EpochTimer()
    trainer.callbacks.append(timer)
    trainer.fit(model, datamodule)
    return [end - start for start, end in pairwise(timer.starts)]


def bare(overrides: list[str]) -> list[float]:
    """Seconds per epoch of the loop everybody can write."""
    cfg = check(overrides)
    datamodule = build.datamodule(cfg)
    datamodule.prepare_data()
    datamodule.setup("fit")
    sets = (datamodule.train_set, datamodule.val_set)
    (images, labels), (val_images, val_labels) = [
        (s.source.images[s.ids].float().div_(255), s.source.labels[s.ids]) for s in sets
    ]
    net = build.model(cfg).net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    seconds = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        order = torch.randperm(len(images))
        for step in range(len(images) // BATCH_SIZE):
            ids = order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            loss = F.cross_entropy(net(images[ids]), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            (net(val_images).argmax(1) == val_labels).float().mean().item()
        seconds.append(time.perf_counter() - start)
    return seconds


def main(rounds: int, threads: int) -> None:
    """Measure in turn, and print the ratio of each pair."""
    torch.set_num_threads(threads)
    results: dict[str, list[Any]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "data=mnist", "model=mlp", "model.optimizer._target_=torch.optim.Adam",
            "model.optimizer.lr=1e-3", f"data.global_batch_size={BATCH_SIZE}",
            f"trainer.max_epochs={EPOCHS}", "trainer.accelerator=cpu",
            *write_mnist(Path(folder) / "data"),
        ]  # fmt: skip
        for number in range(rounds):
            results["bare"].append(median(bare(overrides)))
            results["ours"].append(median(ours(overrides, Path(folder), f"round-{number}")))
    ratios = [a / b for a, b in zip(results["ours"], results["bare"], strict=True)]
    print(f"torch {torch.__version__}, {threads} CPU thread(s), median of {EPOCHS} epochs a round")
    for name, seconds in results.items():
        print(f"{name}: {', '.join(f'{value:.2f}' for value in seconds)} s per epoch")
    print(f"ratio: {', '.join(f'{value:.2f}' for value in ratios)}; median {median(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    arguments = vars(parser.parse_args())
    process.run(lambda: main(**arguments))
