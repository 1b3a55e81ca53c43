"""What all contenders of a workload share: images, the first weights, and the settings of a run."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from samestep.data.loader import BatchLoader
from samestep.hydra import build
from samestep.hydra.compose import check
from samestep.metrics import EpochMean


class Task(NamedTuple):
    """A workload that trains."""

    words: list[str]
    """Of train.py."""
    num_epochs: int = 2
    images: tuple[int, int] = (0, 0)
    """For training, and held out of them for validation."""


CPU = ["trainer.accelerator=cpu"]
ADAM = [
    "model/optimizer=adamw", "model.optimizer._target_=labs.bench.workloads.adam",
    "model.optimizer.lr=1e-3", "~model.optimizer.weight_decay",
    "model.lr_scheduler._target_=labs.bench.workloads.constant",
]  # fmt: skip
MNIST = ["data=mnist", "model=mlp", "data.global_batch_size=128"]
CIFAR = ["data=cifar10", "data.global_batch_size=256"]
CNN = ["model=cnn", "model.net.channels=[6,16]"]  # the net of guide D
LINEAR = [*CPU, "callbacks.checkpoints.monitor=train/loss", "callbacks.checkpoints.mode=min"]
TASKS = {
    "linear": Task(LINEAR, 4),
    "growth": Task(LINEAR, 51),
    "tiny": Task([*CPU, *MNIST], images=(640, 60)),
    "mnist": Task([*CPU, *MNIST], 3, (55_000, 5_000)),
    "operations": Task([*CPU, *CIFAR, *CNN, "data.global_batch_size=4"], 1, (640, 40)),
    "cifar": Task([*CPU, *CIFAR, *CNN], images=(10_000, 2_000)),
    "gpu-guide": Task(["trainer=gpu", *CIFAR, *CNN], 10, (50_000, 5_000)),
    "gpu-resnet": Task(
        ["trainer=gpu", *CIFAR, "model=resnet18", "model.compile=true"], 3, (50_000, 5_000)
    ),
}


def pictures(
    root: str, train: bool, download: bool, num_images: int, shape: Sequence[int]
) -> SimpleNamespace:
    """Images of noise and a pattern of their class: the loss depends on the order."""
    count = num_images if train else 500
    rng = np.random.default_rng(int(train))
    labels = rng.integers(0, 10, count)
    patterns = np.random.default_rng(9).integers(0, 96, (10, *shape), dtype=np.uint8)
    images = rng.integers(0, 160, (count, *shape), dtype=np.uint8) + patterns[labels]
    return SimpleNamespace(data=np.moveaxis(images, 1, 3), targets=labels, classes=[*range(10)])


def adam(groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """One group of parameters, as in the bare loops: each costs kernels of its own."""
    return torch.optim.Adam([p for group in groups for p in group["params"]], **options)


def constant(optimizer: Optimizer, **options: Any) -> LambdaLR:
    """A schedule that changes nothing, because the bare loops have none."""
    return LambdaLR(optimizer, lambda step: 1.0)


class Linear(L.LightningModule):
    """Our interface for any module, around a net that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 10)
        self.sums = EpochMean("train", "loss")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.sums.update(len(batch[0]), loss=loss * len(batch[0]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.sums.means(), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Numbers(L.LightningDataModule):
    """32,000 samples of 20 numbers in 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(32_000, 20, generator=generator)
        labels = (x @ torch.randn(20, 10, generator=generator)).argmax(1)
        self.train_set = TensorDataset(x, labels)

    def train_dataloader(self) -> BatchLoader:
        return BatchLoader(self.train_set, 32)


def configure(task: str, *more: str) -> DictConfig:
    """The configuration of a run of this task."""
    words, num_epochs, (num_train, num_val) = TASKS[task]
    if num_train:
        words = [
            *words, *ADAM, f"data.num_val={num_val}",
            "data.dataset._target_=labs.bench.workloads.pictures",
            f"+data.dataset.num_images={num_train + num_val}",
            "+data.dataset.shape=[${data.num_channels},${data.image_size},${data.image_size}]",
        ]  # fmt: skip
    return check([*words, "run_id=bench", f"trainer.max_epochs={num_epochs}", *more])


def parts(cfg: DictConfig) -> tuple[Any, Any]:
    """The model with its first weights, and the data. ``fit`` calls ``setup`` of the data."""
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    if cfg.callbacks.checkpoints.monitor == "train/loss":
        return Linear(), Numbers()
    return build.build_model(cfg), build.build_datamodule(cfg)
