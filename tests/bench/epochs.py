"""Training: a bare loop, the scripts of textbooks, and ours, on the same images.

Each contender gives the median of its epochs after the first one, in seconds, and its first losses.
"""

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from project.data.augment import Augment, Normalize
from project.data.images import ImageSet, RawBatch
from project.model.nets.cnn import CNN
from project.model.nets.mlp import MLP
from project.model.nets.resnet18 import ResNet18
from tests.bench import sets

EPOCHS = {"linear": 4, "growth": 51, "mnist": 3, "gpu-guide": 10, "gpu-resnet": 3}


def index_pixel_by_pixel(self: ImageSet, positions: Tensor) -> RawBatch:
    ids = self.ids[positions]
    return RawBatch(self.source.images[ids], self.source.labels[ids], ids)


PATCHES = "samestep.ranks.lightning_patches"
LEVERS: dict[str, tuple[str, Any]] = {  # what is put where, to undo each of them
    "gather": ("project.data.images.ImageSet.__getitem__", index_pixel_by_pixel),
    "search": (f"{PATCHES}.search_gpus_once", lambda: None),
    "hooks": (f"{PATCHES}.skip_empty_hooks", lambda trainer: None),
    "names": (f"{PATCHES}.name_hooks_without_checks", lambda: None),
    "profiler": ("samestep.build.NoProfiler", PassThroughProfiler),
    "guard": ("samestep.callbacks.loss_guard.are_finite", lambda gradients: False),
}


def net_of(task: str) -> nn.Module:
    torch.manual_seed(0)
    if task in ("linear", "growth"):
        return nn.Linear(20, 10)
    if task == "gpu-resnet":
        return ResNet18(num_channels=3, image_size=32, num_classes=10)
    if task.startswith(("cifar", "gpu")):
        return CNN(num_channels=3, image_size=32, num_classes=10, channels=(6, 16))
    return MLP(num_channels=1, image_size=28, num_classes=10, hidden_size=85, dropout=0.0)


def numbers() -> TensorDataset:
    """32,000 samples of 20 numbers in 10 classes, for the cost of a step that computes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32_000, 20, generator=generator)
    return TensorDataset(x, (x @ torch.randn(20, 10, generator=generator)).argmax(1))


def rank_and_size() -> tuple[int, int]:
    """Meet the other ranks, if torchrun has started some."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def bare(task: str, folder: str) -> dict[str, Any]:
    """The loop that everybody can write: all images in memory, ready to use, and nothing else."""
    rank, size = rank_and_size()
    device = torch.device("cuda" if task.startswith("gpu") else "cpu")
    augment = None
    if task in ("linear", "growth"):
        images, labels = numbers().tensors
        orders, batch_size = [torch.arange(len(images))] * EPOCHS[task], 32
        val = images[:0], labels[:0]
    else:
        data = torch.load(Path(folder, task, "tensors.pt"))
        (images, labels), val = data["train"], data["val"]
        orders, batch_size = data["orders"], data["batch_size"]
        normalize = Normalize(data["mean"], data["std"]).to(device)
        images, val = images.to(device), (normalize(val[0].to(device)), val[1].to(device))
        labels = labels.to(device)
        if task.startswith(("cifar", "gpu")):
            augment = Augment(crop_padding=4, flip=True, seed=0)
        else:
            images = normalize(images)
    net: Any = net_of(task).to(device)
    if task == "gpu-resnet":
        net.to(memory_format=torch.channels_last).compile()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    if size > 1:
        net = DistributedDataParallel(net)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    seconds, losses = [], []
    for epoch in range(EPOCHS.get(task, 2)):
        start = time.perf_counter()
        order = orders[min(epoch, len(orders) - 1)]
        for number in range(len(order) // batch_size):
            ids = order[number * batch_size :][:batch_size]
            begin, end = batch_size * rank // size, batch_size * (rank + 1) // size
            ids = ids[begin:end].to(device)
            batch = images[ids]
            if augment:
                from samestep.data.sampler import Slice  # of one rank: what Augment is told

                batch = normalize(augment(batch, Slice(ids, epoch, number, begin, batch_size)))
            with precision:
                loss = F.cross_entropy(net(batch), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if len(losses) < sets.CURVE:
                losses.append(loss.detach())
        with torch.no_grad(), precision:
            for part, answer in zip(val[0].split(2048), val[1].split(2048), strict=True):
                (net(part).argmax(1) == answer).sum().item()
        seconds.append(time.perf_counter() - start)
    return result_of(seconds, [float(loss) for loss in losses])


class PerSample(Dataset[tuple[Tensor, int]]):
    """Images as torchvision gives them: each goes through its transforms alone."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Callable[[Any], Tensor]) -> None:
        self.images, self.labels, self.transform = images, labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        pixels = self.images[index].permute(1, 2, 0).squeeze(-1).numpy()
        return self.transform(Image.fromarray(pixels)), self.labels[index]


def textbook_data(task: str, folder: str) -> tuple[list[PerSample], int]:
    from torchvision import transforms as T

    data = torch.load(Path(folder, task, "tensors.pt"))
    last = [T.ToTensor(), T.Normalize(data["mean"], data["std"])]
    first = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()] if task == "cifar" else []
    train, val = T.Compose([*first, *last]), T.Compose(last)
    return [PerSample(*data["train"], train), PerSample(*data["val"], val)], data["batch_size"]


def textbook_ddp(task: str, folder: str) -> dict[str, Any]:
    """The script of DDP tutorials: DataLoader, transforms per sample, DistributedSampler."""
    rank, size = rank_and_size()
    (train, val), batch_size = textbook_data(task, folder)
    sampler = DistributedSampler(train, size, rank)
    loader = DataLoader(train, batch_size // size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, 2048 // size)
    net: Any = net_of(task)
    if size > 1:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    seconds = []
    for epoch in range(2):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            sum((net(images).argmax(1) == labels).sum().item() for images, labels in val_loader)
        seconds.append(time.perf_counter() - start)
    return result_of(seconds)


def textbook_lightning(task: str, folder: str) -> dict[str, Any]:
    """A LightningModule of tutorials: two metrics and two logs in each step."""
    import lightning as L
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net_of(task)
            self.losses = nn.ModuleDict({"fit": MeanMetric(), "val": MeanMetric()})
            self.accuracies = nn.ModuleDict(
                {"fit": MulticlassAccuracy(10), "val": MulticlassAccuracy(10)}
            )

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

    (train, val), batch_size = textbook_data(task, folder)
    timer = make_timer()
    with tempfile.TemporaryDirectory() as root:
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[timer], enable_progress_bar=False,
            default_root_dir=root, num_sanity_val_steps=0, enable_model_summary=False,
        )  # fmt: skip
        loaders = DataLoader(train, batch_size, shuffle=True), DataLoader(val, 2048)
        trainer.fit(Module(), *loaders)
    return dict(timer.result())


def result_of(seconds: list[float], curve: list[float] | None = None) -> dict[str, Any]:
    """What the harness is told: the first epoch warms up."""
    return {"value": median(seconds[1:] or seconds), "curve": curve or []}


def make_timer() -> Any:
    """A callback with the seconds of each epoch, the first losses, and the memory of now."""
    import lightning as L

    class Timer(L.Callback):
        def __init__(self) -> None:
            self.starts: list[float] = []
            self.losses: list[Tensor] = []
            self.resident: list[int] = []  # pages

        def on_train_epoch_start(self, *_: Any) -> None:
            self.starts.append(time.perf_counter())
            self.resident.append(int(Path("/proc/self/statm").read_text().split()[1]))

        def on_train_batch_end(
            self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any
        ) -> None:
            if len(self.losses) < sets.CURVE:
                self.losses.append(outputs["loss"].detach())

        def on_train_end(self, *_: Any) -> None:
            self.starts.append(time.perf_counter())

        def result(self) -> dict[str, Any]:
            seconds = [end - start for start, end in pairwise(self.starts)]
            return result_of(seconds, [float(loss) for loss in self.losses])

    return Timer()


def linear_parts() -> tuple[Any, Any]:
    """Our interface for any module: a BatchLoader, and Sums for the metrics."""
    import lightning as L

    from samestep.callbacks.sums import Sums
    from samestep.data.loader import BatchLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net_of("linear")
            self.sums = Sums("train", "loss")

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.sums.update(len(batch[0]), loss=loss * len(batch[0]))
            return loss

        def on_train_epoch_end(self) -> None:
            self.log_dict(self.sums.means(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)

    return Module(), BatchLoader(numbers(), 32)


def ours(task: str, folder: str, without: str = "") -> dict[str, Any]:
    """A run with everything on: all guards, history, checkpoints, progress.

    ``without`` undoes a lever, or everything: ``callbacks`` leaves Lightning's Trainer alone.
    """
    if without not in LEVERS:
        timer = train_ours(task, folder, is_plain=without == "callbacks")
        return dict(timer.result())
    with patch(*LEVERS[without]):
        return dict(train_ours(task, folder).result())


def growth(folder: str) -> dict[str, Any]:
    """The memory after 50 epochs, and after 10."""
    resident = train_ours("growth", folder).resident
    return {"value": resident[50] / resident[10]}


def wrong(task: str, folder: str) -> dict[str, Any]:
    """A contender that the gate must catch: it skips the first batch."""
    result = bare(task, folder)
    return result | {"curve": result["curve"][1:] + result["curve"][:1]}


def train_ours(task: str, folder: str, is_plain: bool = False) -> Any:
    """Train with our parts, or with Lightning's Trainer alone; returns the timer."""
    import lightning as L

    from samestep import build
    from samestep.config.compose import check
    from samestep.ranks import process_group
    from samestep.run.history import History

    is_linear = task in ("linear", "growth")
    words = ["callbacks.best.monitor=train/loss", "trainer.accelerator=cpu"]
    if not is_linear:
        words = sets.overrides(task, Path(folder))
    epochs = EPOCHS.get(task, 2)
    with tempfile.TemporaryDirectory() as root:
        cfg = check([*words, f"run_root={root}", "run_id=bench", f"trainer.max_epochs={epochs}"])
        with process_group.process_group(cfg):
            L.seed_everything(cfg.seed, workers=True, verbose=False)
            if is_linear:
                model, data = linear_parts()
            else:
                model, data = build.model(cfg), build.datamodule(cfg)
            Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
            history, timer = History(cfg.run_dir), make_timer()
            if is_plain:
                trainer = L.Trainer(
                    accelerator="cpu", max_epochs=epochs, logger=False, num_sanity_val_steps=0,
                    enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False,
                )  # fmt: skip
            else:
                trainer = build.trainer(cfg, history)
                trainer.loggers = [history]
            trainer.callbacks.append(timer)
            trainer.fit(model, data)
    return timer
