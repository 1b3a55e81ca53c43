"""Training: a bare loop, the scripts of textbooks, and ours, on the same images.

python -m tests.bench.epochs ours mnist FOLDER      # one contender, in this process
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from project.data.augment import Augment, Normalize
from project.model.nets.cnn import CNN
from project.model.nets.mlp import MLP
from project.model.nets.resnet18 import ResNet18
from tests.bench import recipes
from tests.bench.measure import PYTHON, Claim, Row, say

EPOCHS = {"linear": 20, "growth": 51, "mnist": 3, "gpu-guide": 10, "gpu-resnet": 3}
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone"]


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
    """3,200 samples of 20 numbers in 10 classes, for the cost of a step that computes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3_200, 20, generator=generator)
    return TensorDataset(x, (x @ torch.randn(20, 10, generator=generator)).argmax(1))


def rank_and_size() -> tuple[int, int]:
    """Meet the other ranks, if torchrun has started some."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def bare(task: str, folder: Path) -> dict[str, Any]:
    """The loop everybody can write: all images in memory, ready to use, and nothing else."""
    rank, size = rank_and_size()
    device = torch.device("cuda" if task.startswith("gpu") else "cpu")
    augment = None
    if task in ("linear", "growth"):
        images, labels = numbers().tensors
        orders, batch_size = [torch.arange(len(images))] * EPOCHS[task], 32
        val = images[:0], labels[:0]
    else:
        data = torch.load(folder / task / "tensors.pt")
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
            if len(losses) < recipes.CURVE:
                losses.append(loss.detach())
        with torch.no_grad(), precision:
            for part, answer in zip(val[0].split(2048), val[1].split(2048), strict=True):
                (net(part).argmax(1) == answer).sum().item()
        seconds.append(time.perf_counter() - start)
    return {"epochs": seconds, "curve": [float(loss) for loss in losses]}


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


def textbook_data(task: str, folder: Path) -> tuple[list[PerSample], int]:
    from torchvision import transforms as T

    data = torch.load(folder / task / "tensors.pt")
    last = [T.ToTensor(), T.Normalize(data["mean"], data["std"])]
    first = [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip()] if task == "cifar" else []
    train, val = T.Compose([*first, *last]), T.Compose(last)
    return [PerSample(*data["train"], train), PerSample(*data["val"], val)], data["batch_size"]


def textbook_ddp(task: str, folder: Path) -> dict[str, Any]:
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
    return {"epochs": seconds}


def textbook_lightning(task: str, folder: Path) -> dict[str, Any]:
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
    return timer.result()


def make_timer() -> Any:
    """A callback with the seconds of each epoch, and the first losses."""
    import lightning as L

    class Timer(L.Callback):
        def __init__(self) -> None:
            self.starts: list[float] = []
            self.losses: list[Tensor] = []
            self.resident: list[float] = []

        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            self.starts.append(time.perf_counter())
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.resident.append(pages * 4096 / 2**20)

        def on_train_batch_end(
            self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any
        ) -> None:
            if len(self.losses) < recipes.CURVE:
                self.losses.append(outputs["loss"].detach())

        def on_train_end(self, *_: Any) -> None:
            self.starts.append(time.perf_counter())

        def result(self) -> dict[str, Any]:
            seconds = [end - start for start, end in pairwise(self.starts)]
            curve = [float(loss) for loss in self.losses]
            return {"epochs": seconds, "curve": curve, "resident": self.resident}

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


def ours(task: str, folder: Path, plain: bool = False) -> dict[str, Any]:
    """A run with everything on: all guards, history, checkpoints, progress."""
    import lightning as L

    from samestep import build
    from samestep.config.compose import check
    from samestep.ranks import process_group
    from samestep.run.history import History

    is_linear = task in ("linear", "growth")
    words = ["callbacks.best.monitor=train/loss", "trainer.accelerator=cpu"]
    if not is_linear:
        words = recipes.overrides(task, folder)
    with tempfile.TemporaryDirectory() as root:
        epochs = EPOCHS.get(task, 2)
        cfg = check([*words, f"run_root={root}", "run_id=bench", f"trainer.max_epochs={epochs}"])
        with process_group.process_group(cfg):
            L.seed_everything(cfg.seed, workers=True, verbose=False)
            if is_linear:
                model, data = linear_parts()
            else:
                model, data = build.model(cfg), build.datamodule(cfg)
            Path(cfg.run_dir).mkdir(parents=True, exist_ok=True)
            history, timer = History(cfg.run_dir), make_timer()
            if plain:
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
    return timer.result()


def plain_lightning(task: str, folder: Path) -> dict[str, Any]:
    """Lightning's Trainer without any callback, with our model and our data."""
    return ours(task, folder, plain=True)


def wrong(task: str, folder: Path) -> dict[str, Any]:
    """A contender that the gate must catch: it skips the first batch."""
    result = bare(task, folder)
    return result | {"curve": result["curve"][1:] + result["curve"][:1]}


CONTENDERS = {
    "bare": bare, "textbook-ddp": textbook_ddp, "textbook-lightning": textbook_lightning,
    "plain-lightning": plain_lightning, "ours": ours, "wrong": wrong,
}  # fmt: skip


def command(name: str, task: str, folder: Path, num_ranks: int = 1) -> list[str]:
    """The command of a contender; several ranks are started by torchrun."""
    words = ["-m", "tests.bench.epochs", name, task, str(folder)]
    if num_ranks == 1:
        return [PYTHON, *words]
    return [*TORCHRUN, f"--nproc-per-node={num_ranks}", *words]


def rows(folder: Path) -> Iterator[Row]:
    def row(name: str, title: str, task: str, names: list[str], claims: list[Claim],
            **more: Any) -> Row:  # fmt: skip
        prepare = more.pop("prepare", lambda: recipes.write_tensors(task, folder))
        contenders = {each: command(each, task, folder) for each in names}
        same = tuple(each for each in names if not each.startswith("textbook"))
        return Row(name, title, contenders, claims, prepare, same_curve=same, **more)

    yield row(
        "step", "step: linear 20 to 10, batch 32", "linear", ["bare", "ours"],
        [Claim("ours - bare <= 0.4 ms a step", "ours", "bare", 0.4, subtract=True,
               scale=10, unit=" ms")],
        prepare=lambda: None,
    )  # fmt: skip
    yield row(
        "mnist", "MNIST-format epoch", "mnist",
        ["bare", "plain-lightning", "ours", "textbook-lightning"],
        [Claim("ours / bare <= 1.4", "ours", "bare", 1.4),
         Claim("plain Lightning / bare", "plain-lightning", "bare"),
         Claim("textbook Lightning / ours >= 5", "textbook-lightning", "ours", 5, at_least=True)],
    )  # fmt: skip
    yield row(
        "cifar", "CIFAR-format epoch", "cifar", ["bare", "ours", "textbook-ddp"],
        [Claim("ours / bare <= 1.1", "ours", "bare", 1.1),
         Claim("textbook DDP / ours >= 1.5", "textbook-ddp", "ours", 1.5, at_least=True)],
    )  # fmt: skip
    yield Row(
        "ranks", "CIFAR-format epoch, ranks of one thread on 2 cores",
        {"bare 1": command("bare", "cifar", folder), "bare 2": command("bare", "cifar", folder, 2),
         "ours 1": command("ours", "cifar", folder), "ours 2": command("ours", "cifar", folder, 2),
         "ours 4": command("ours", "cifar", folder, 4)},
        [Claim("ours / bare DDP on 2 ranks <= 1.15", "ours 2", "bare 2", 1.15),
         Claim("images/s of 2 ranks / 1 rank >= 1.7", "ours 1", "ours 2", 1.7, at_least=True),
         Claim("bare DDP: images/s of 2 ranks / 1 rank", "bare 1", "bare 2"),
         Claim("images/s of 4 ranks / 1 rank", "ours 1", "ours 4")],
        lambda: recipes.write_tensors("cifar", folder),
        same_curve=("bare 2", "ours 2"),
    )  # fmt: skip
    yield Row(
        "growth", "memory over 50 epochs", {"ours": command("ours", "growth", folder)},
        [Claim("epoch 50 / epoch 10 <= 1.02", "ours", None, 1.02)],
    )  # fmt: skip
    yield row(
        "gpu-resnet", "GPU: ResNet-18, bf16, compiled", "gpu-resnet", ["bare", "ours"],
        [Claim("images/s of ours / bare >= 0.95", "bare", "ours", 0.95, at_least=True)],
        needs_gpu=True,
    )  # fmt: skip
    yield row(
        "gpu-guide", "GPU: net of guide D, an epoch of 50 k images", "gpu-guide",
        ["bare", "ours"],
        [Claim("ours, 10 epochs", "ours", scale=10, unit=" s"),
         Claim("bare, 10 epochs", "bare", scale=10, unit=" s")],
        needs_gpu=True,
    )  # fmt: skip


def main() -> None:
    name, task, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    result = CONTENDERS[name](task, folder)
    epochs = result.pop("epochs")
    warm = sorted(islice(epochs, 1 if len(epochs) > 1 else 0, None))
    resident = result.pop("resident", [])
    seconds = warm[len(warm) // 2]
    if task == "growth":
        seconds = resident[50] / resident[10]
    if int(os.environ.get("RANK", 0)) == 0:
        say(seconds=seconds, **result)


if __name__ == "__main__":
    main()
