"""What all contenders of a workload share: images, their order, and the settings of ours."""

import pickle
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

CURVE = 20  # first losses, by which the gate compares contenders
ADAM = [
    "model.optimizer._target_=torch.optim.Adam", "model.optimizer.lr=1e-3",
    "model.lr_scheduler._target_=tests.bench.sets.constant",
    "~model.lr_scheduler.warmup", "~model.optimizer.weight_decay",
]  # fmt: skip
NUM_TEST = 500
SIZES = {  # training images, and images held out of them
    "mnist": (55_000, 5_000), "cifar": (10_000, 2_000), "tiny": (640, 60),
    "data-1": (5_500, 500), "data-10": (55_000, 5_000), "data-100": (550_000, 50_000),
    "gpu-guide": (50_000, 5_000), "gpu-resnet": (50_000, 5_000),
}  # fmt: skip


def constant(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """A schedule that changes nothing, because the bare loops have none."""
    return LambdaLR(optimizer, lambda step: 1.0)


def overrides(task: str, folder: Path) -> list[str]:
    """The words of train.py for a task."""
    is_cifar = task.startswith(("cifar", "gpu"))
    checksums = (folder / task / "checksums.txt").read_text()
    words = [
        "data=cifar10" if is_cifar else "data=mnist", "model=cnn" if is_cifar else "model=mlp",
        *ADAM, f"data.root={folder / task}", f"data.num_val={SIZES[task][1]}",
        "trainer.accelerator=cpu", f"data.global_batch_size={256 if is_cifar else 128}", checksums,
    ]  # fmt: skip
    if task.startswith("gpu"):
        words[words.index("trainer.accelerator=cpu")] = "trainer=gpu"
    if task == "gpu-resnet":
        words[words.index("model=cnn")] = "model=resnet18"
        words.append("model.compile=true")
    elif is_cifar:
        words.append("model.net.channels=[6,16]")
    return words


def pictures(count: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise, and in it a pattern of its class: the loss falls, and depends on the order."""
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(9).integers(0, 96, (10, *shape), dtype=np.uint8)
    labels = rng.integers(0, 10, count, dtype=np.uint8)
    return rng.integers(0, 160, (count, *shape), dtype=np.uint8) + patterns[labels], labels


def write_images(task: str, folder: Path) -> None:
    """Write a set in the format of MNIST or CIFAR-10, with the overrides of its checksums."""
    root = folder / task
    if (root / "checksums.txt").exists():
        return
    num_train, num_test = sum(SIZES[task]), NUM_TEST
    if task.startswith(("cifar", "gpu")):
        files = dict(cifar_files(num_train, num_test))
        place, key = root / "cifar10", "cifar-10-batches-py/"
    else:
        files = dict(mnist_files(num_train, num_test))
        place, key = root / "mnist", ""
    (place / key).mkdir(parents=True)
    digests = []
    for name, content in files.items():
        (place / key / name).write_bytes(content)
        digest = md5(content, usedforsecurity=False).hexdigest()
        digests.append(f"{key}{name}: '{digest}'")
    (root / "checksums.txt").write_text(f"data.source.files={{{', '.join(digests)}}}")


def mnist_files(num_train: int, num_test: int) -> Iterator[tuple[str, bytes]]:
    for seed, (split, count) in enumerate([("train", num_train), ("t10k", num_test)]):
        arrays = pictures(count, (28, 28), seed)
        for name, magic, array in zip(
            ("images-idx3", "labels-idx1"), (2051, 2049), arrays, strict=True
        ):
            header = np.array([magic, *array.shape], dtype=">i4").tobytes()
            yield f"{split}-{name}-ubyte", header + array.tobytes()


def cifar_files(num_train: int, num_test: int) -> Iterator[tuple[str, bytes]]:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names):
        images, labels = pictures(num_test if name == "test_batch" else num_train // 5,
                                  (3, 32, 32), seed)  # fmt: skip
        yield name, pickle.dumps({"data": images.reshape(len(images), -1),
                                  "labels": labels.tolist()}, protocol=4)  # fmt: skip


def write_tensors(task: str, folder: Path, num_epochs: int = 3) -> None:
    """Write what the other contenders read: the images of our split, and their order."""
    from samestep import build
    from samestep.config.compose import check
    from samestep.data.sampler import generator

    path = folder / task / "tensors.pt"
    write_images(task, folder)
    if path.exists():
        return
    cfg = check(overrides(task, folder))
    data = build.datamodule(cfg)
    data.prepare_data()
    data.setup("fit")
    parts = {}
    for name, part in (("train", data.train_set), ("val", data.val_set)):
        parts[name] = (part.source.images[part.ids], part.source.labels[part.ids])
    num_train = len(data.train_set)
    orders = [torch.randperm(num_train, generator=generator(0, e)) for e in range(num_epochs)]
    batch = int(cfg.data.global_batch_size)
    torch.save({**parts, "orders": orders, "mean": data.mean, "std": data.std,
                "batch_size": batch}, path)  # fmt: skip


def write_runs(folder: Path, count: int) -> None:
    """A folder with so many finished runs."""
    for number in range(count):
        run_dir = folder / f"runs-{count}" / f"digits-cnn-{number:06}"
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "metrics.json").write_text("{}")


def write_photos(folder: Path, count: int = 100) -> None:
    """JPEGs of 500 x 375 pixels in data/train and data/test, two classes."""
    if (folder / "photos").exists():
        return
    rng = np.random.default_rng(0)
    for number in range(count + 20):
        part = "train" if number < count else "test"
        path = folder / "photos" / part / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        rough = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(rough.resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = smooth + rng.normal(0, 12, (375, 500, 1)).astype(np.int16)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
