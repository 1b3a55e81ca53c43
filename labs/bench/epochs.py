"""Training: a bare loop, the scripts of textbooks, and ours, on the same images.

Each contender gives the median of its epochs after the first one, in seconds. Those of our recipe
give their first losses too, as means over the ranks.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from statistics import median
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from labs.bench.callbacks import CURVE, Timer, mean_over_ranks
from labs.bench.workloads import TASKS, configure, parts
from samestep.data.sampler import Slice
from samestep.data.seeds import generator
from samestep.hydra import build

NOTHING = nullcontext()
Batches = Iterable[Sequence[Tensor]]


PATCHES = "samestep.ranks.compat"
LEVERS = {  # what makes our steps cheap: how, and what is put where to undo it
    "gather": ("batches copied image by image", "samestep.data.loader.take", Tensor.__getitem__),
    "search": ("no search for GPUs", f"{PATCHES}.search_gpus_once", lambda: None),
    "loop": ("calls only what there is",
             "samestep.plugins.fast_step.FastEpochLoop._take_short_way",
             _TrainingEpochLoop.advance),
    "guard": ("gradients checked by their sum", "samestep.callbacks.loss_guard.sum_on_cpu",
              lambda gradients: None),
}  # fmt: skip


def rank_and_size() -> tuple[int, int]:
    """Meet the other ranks, if torchrun has started some."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def loop(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    epochs: Iterable[tuple[Batches, Batches]],
    precision: AbstractContextManager[Any] = NOTHING,
) -> dict[str, Any]:
    """Train a net with each epoch's batches, and count its hits in those of validation."""
    # A script without Lightning has not got this variable, with which Adam searches for GPUs.
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    if dist.is_initialized():
        net = DistributedDataParallel(net)
    seconds, losses = [], []
    for train, val in epochs:
        start = time.perf_counter()
        for images, labels in train:
            with precision:
                loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if len(losses) < CURVE:
                losses.append(loss.detach())
        with torch.no_grad(), precision:
            for images, labels in val:
                (net(images).argmax(1) == labels).sum().item()
        seconds.append(time.perf_counter() - start)
    return {"value": median(seconds[1:] or seconds), "curve": mean_over_ranks(losses)}


def bare(task: str, *more: str) -> dict[str, Any]:
    """The loop that everybody can write: all images in memory, ready to use, and nothing else."""
    rank, size = rank_and_size()
    model, data = parts(configure(task, *more))
    data.setup("fit")
    device = torch.device("cuda" if task.startswith("gpu") else "cpu")
    net, model.net = model.net.to(device), nn.Identity()
    normalize = model.to(device)
    images, labels = (tensor.to(device) for tensor in data.train_set.tensors)
    val_images, val_labels = (tensor.to(device) for tensor in data.val_set.tensors)
    val = list(zip(normalize(val_images).split(2048), val_labels.split(2048), strict=True))
    if not data.flip:
        images = normalize(images)
    batch_size = data.global_batch_size
    begin, end = batch_size * rank // size, batch_size * (rank + 1) // size

    def batches(epoch: int) -> Iterator[list[Tensor]]:
        order = torch.randperm(len(images), generator=generator(data.seed, epoch))
        for number in range(len(order) // batch_size):
            ids = order[number * batch_size :][begin:end].to(device)
            batch = [images[ids], labels[ids]]
            if data.flip:
                batch = data.augment(batch, Slice(ids, epoch, number, begin, batch_size))
                batch[0] = normalize(batch[0])
            yield batch

    if task == "gpu-resnet":
        net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    precision = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else NOTHING
    epochs = ((batches(epoch), val) for epoch in range(TASKS[task].num_epochs))
    return loop(net, optimizer, epochs, precision)


def bare_linear() -> dict[str, Any]:
    """The same for the task that computes almost nothing."""
    model, data = parts(configure("linear"))
    x, labels = data.train_set.tensors
    order = torch.arange(len(x)).split(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    epochs = (
        (((x[ids], labels[ids]) for ids in order), []) for _ in range(TASKS["linear"].num_epochs)
    )
    return loop(model.net, optimizer, epochs)


class PerSample(Dataset[tuple[Tensor, int]]):
    """Images as torchvision gives them: each goes through its transforms alone."""

    def __init__(self, images: TensorDataset, transform: Callable[[Any], Tensor]) -> None:
        self.images, labels = images.tensors
        self.labels, self.transform = labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        pixels = self.images[index].permute(1, 2, 0).squeeze(-1).numpy()
        return self.transform(Image.fromarray(pixels)), self.labels[index]


def textbook_data(data: Any) -> tuple[PerSample, PerSample]:
    """The images for training and validation, each with its transforms."""
    from torchvision import transforms as T

    data.setup("fit")
    last = [T.ToTensor(), T.Normalize(data.mean, data.std)]
    first = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()] if data.flip else []
    return (
        PerSample(data.train_set, T.Compose([*first, *last])),
        PerSample(data.val_set, T.Compose(last)),
    )


def textbook_ddp(task: str) -> dict[str, Any]:
    """The script of DDP tutorials: DataLoader, transforms per sample, DistributedSampler."""
    rank, size = rank_and_size()
    model, data = parts(configure(task))
    train, val = textbook_data(data)
    sampler = DistributedSampler(train, size, rank)
    loader = DataLoader(train, data.global_batch_size // size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 2048 // size)

    def epochs() -> Iterator[tuple[Batches, Batches]]:
        for epoch in range(TASKS[task].num_epochs):
            sampler.set_epoch(epoch)
            yield loader, val_loader

    optimizer = torch.optim.Adam(model.net.parameters(), lr=1e-3)
    # It draws another order and other crops, so its losses are not compared.
    return {"value": loop(model.net, optimizer, epochs())["value"]}


class TextbookModule(L.LightningModule):
    """A LightningModule of tutorials: two metrics and two logs in each step."""

    def __init__(self, net: nn.Module) -> None:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        self.net = net
        stages = ("fit", "val")
        self.losses = nn.ModuleDict({stage: MeanMetric() for stage in stages})
        self.accuracies = nn.ModuleDict({stage: MulticlassAccuracy(10) for stage in stages})

    def step(self, batch: Any, stage: str) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels)
        self.losses[stage](loss)
        self.accuracies[stage](logits, labels)
        self.log(f"{stage}/loss", self.losses[stage], on_step=False, on_epoch=True)
        self.log(f"{stage}/acc", self.accuracies[stage], on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "fit")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def trainer_of(num_epochs: int, timer: Timer, **flags: Any) -> L.Trainer:
    """Lightning's Trainer without any callback of ours."""
    return L.Trainer(
        accelerator="cpu", max_epochs=num_epochs, callbacks=[timer], num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, **flags,
    )  # fmt: skip


def textbook_lightning(task: str) -> dict[str, Any]:
    """The script of Lightning tutorials, with the loggers and checkpoints that it comes with."""
    model, data = parts(configure(task))
    train, val = textbook_data(data)
    loaders = DataLoader(train, data.global_batch_size, shuffle=True), DataLoader(val, 2048)
    timer = Timer()
    with tempfile.TemporaryDirectory() as root:
        trainer_of(1, timer, default_root_dir=root).fit(TextbookModule(model.net), *loaders)
    return {"value": timer.seconds()}


def plain_lightning(task: str) -> dict[str, Any]:
    """Our model and our data, under Lightning's Trainer."""
    timer = Timer()
    trainer = trainer_of(TASKS[task].num_epochs, timer, logger=False, enable_checkpointing=False)
    trainer.fit(*parts(configure(task)))
    return {"value": timer.seconds(), "curve": timer.curve}


def ours(task: str, without: str = "") -> dict[str, Any]:
    """A run with everything on: guards, history, checkpoints, progress; ``without`` a lever."""
    with patch(*LEVERS[without][1:]) if without else NOTHING:
        timer = train_ours(task)
    return {"value": timer.seconds(), "curve": timer.curve}


def timed(task: str, *more: str) -> dict[str, float]:
    """A run with other settings, whose losses may be others."""
    return {"value": train_ours(task, *more).seconds()}


def growth() -> dict[str, float]:
    """The memory after 50 epochs, and after 10."""
    pages = train_ours("growth").resident
    return {"value": pages[50] / pages[10]}


def train_ours(task: str, *more: str) -> Timer:
    """Train with our parts; returns what the timer has seen."""
    with tempfile.TemporaryDirectory() as root:
        cfg = configure(task, f"run_root={root}", *more)
        timer = Timer()
        # The result of a contender is all that it may print.
        with redirect_stdout(sys.stderr):
            trainer, *_ = build.build_run(cfg)
            trainer.callbacks.append(timer)
            model, data = parts(cfg)
            trainer.fit(model, datamodule=data)
    return timer
