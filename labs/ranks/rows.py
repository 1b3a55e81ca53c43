"""The nets and losses of the table: each depends on which samples a slice has, or on its order."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import Accuracy, F1Score, MeanMetric, MetricCollection

from samestep import BatchLoader
from samestep.metrics import EpochMean

NUM_INPUTS, NUM_CLASSES = 12, 4
CLASS_WEIGHTS = torch.linspace(0.2, 3, NUM_CLASSES)
VIRTUAL_RANKS = 8
NUMBERS = 1, 2, 3, 4, 8
"""Of ranks."""

Loaders = tuple[Any, Any, Any]
"""Those of the training, the validation and the test."""


class Row(NamedTuple):
    """One row of the table.

    model: makes the module.
    loaders: makes the loaders.
    options: of the Trainer.
    ranks: on which it begins.
    """

    name: str
    model: Callable[[], L.LightningModule]
    loaders: Callable[[], Loaders]
    options: Mapping[str, Any] = {}
    ranks: Sequence[int] = NUMBERS


# -- Data ------------------------------------------------------------------------------------------


def table(num_samples: int, seed: int = 0) -> TensorDataset:
    """x ``[12]``, and a class of four that it tells."""
    x = torch.randn(num_samples, NUM_INPUTS, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :NUM_CLASSES].argmax(1))


class Noisy(Dataset[Any]):
    """Samples to which a transform adds random numbers."""

    def __init__(self, num_samples: int) -> None:
        self.samples = table(num_samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + 0.1 * torch.randn(NUM_INPUTS), y


def exact(batch_size: int = 64, num_samples: int = 208) -> Loaders:
    """BatchLoaders; the last batch of the validation has fewer samples than slices."""
    train = BatchLoader(table(num_samples), batch_size, shuffle=True, seed=1)
    return train, BatchLoader(table(45, 1), 20), BatchLoader(table(43, 2), 20)


def ordinary(batch_size: int) -> Loaders:
    """DataLoaders of torch, with loader processes and random transforms."""
    train = DataLoader(Noisy(208), batch_size, shuffle=True, num_workers=1)
    return train, DataLoader(Noisy(45), 20), DataLoader(table(43, 2), 20)


def several() -> Loaders:
    """Two training loaders, of which the shorter one begins again."""
    longer, validation, test = exact(num_samples=256)
    train = {"a": longer, "b": BatchLoader(table(64, 3), 32, shuffle=True, seed=2)}
    return train, validation, test


# -- Modules ---------------------------------------------------------------------------------------


class Task(L.LightningModule):
    """A net, and a loss of its logits and the classes."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss_of = net, loss

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return self.loss_of(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch[0]))
        self.log("val/random", torch.rand(()), batch_size=len(batch[0]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(NUM_INPUTS, 16), *between, nn.ReLU(), nn.Linear(16, NUM_CLASSES))


def large() -> nn.Sequential:
    """With a gradient of more than ``virtual.GATHER_BELOW`` bytes."""
    return nn.Sequential(nn.Linear(NUM_INPUTS, 5000), nn.Tanh(), nn.Linear(5000, NUM_CLASSES))


def class_weights(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=CLASS_WEIGHTS.to(logits))


def ignoring(logits: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, y, ignore_index=0, label_smoothing=0.1, reduction="sum")
    return losses / (y != 0).sum().clamp(min=1)


def dice(logits: Tensor, y: Tensor) -> Tensor:
    found, wanted = logits.softmax(1), F.one_hot(y, NUM_CLASSES)
    return 1 - (2 * (found * wanted).sum(0) + 1).div(found.sum(0) + wanted.sum(0) + 1).mean()


def rmse(logits: Tensor, y: Tensor) -> Tensor:
    return (logits[:, 0] - y).square().mean().sqrt()


def norm_and_dropout() -> L.LightningModule:
    return Task(mlp(nn.BatchNorm1d(16), nn.Dropout(0.3)), class_weights)


def of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], L.LightningModule]:
    return lambda: Task(mlp(nn.LayerNorm(16), nn.Dropout(0.3)), loss)


class Contrast(Task):
    """InfoNCE of two views, with noise that the step draws, and the transfer of a batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    def loss(self, batch: Any) -> Tensor:
        views = [self.net(batch[0] + 0.3 * torch.randn_like(batch[0])) for _ in range(2)]
        first, second = (F.normalize(view, dim=1) for view in views)
        return F.cross_entropy(5 * first @ second.T, torch.arange(len(first)))


class Attention(nn.Module):
    """A text model, whose embedding is also its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.embedding((x.abs() * 2).long() % NUM_CLASSES))
        return F.linear(hidden.mean(1), self.embedding.weight)


class Codebook(nn.Module):
    """Vector quantization: the nearest code, which moves to the mean of what it stands for."""

    codes: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 16))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        nearest = F.one_hot(torch.cdist(x, self.codes).argmin(1), 6).to(x)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(0.1 * nearest.sum(0))
                self.codes.mul_(0.9).add_(0.1 * nearest.T @ x / self.counts[:, None].clamp(min=1))
        return x + (nearest @ self.codes - x).detach()


class Scaled(Task):
    """Counts its steps and remembers its loss in attributes, which scale the next loss."""

    def __init__(self) -> None:
        super().__init__(mlp(nn.Dropout(0.3)), class_weights)
        self.calls = 0
        self.mean_loss: Any = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()
        return loss * (1 + 0.01 * self.calls) / self.mean_loss


class Scheduled(Task):
    """L-BFGS, and a schedule of each step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Mixture(nn.Module):
    """One expert for each batch, by its first sample: most slices leave most parameters out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp() for _ in range(9)])

    def forward(self, x: Tensor) -> Tensor:
        # The last expert is of no batch.
        number = int(x[0, :3].gt(0).long() @ torch.tensor([1, 2, 4])) if len(x) else 0
        return self.experts[number](x)


class Measured(Task):
    """Metrics of every kind."""

    def __init__(self) -> None:
        super().__init__(mlp(nn.BatchNorm1d(16)), class_weights)
        self.accuracy = Accuracy("multiclass", num_classes=NUM_CLASSES)
        each = Accuracy("multiclass", num_classes=NUM_CLASSES)
        macro = F1Score("multiclass", num_classes=NUM_CLASSES, average="macro")
        self.collection = MetricCollection([each, macro], prefix="val/")
        self.running = MeanMetric()
        self.means = EpochMean("train", "mean")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("train/accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("train/largest", x.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.means.update(len(x), mean=loss.detach() * len(x))
        self.running.update(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if len(batch[0]):
            self.collection.update(self.net(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.means.means())
        self.log("train/running", self.running.compute())
        self.running.reset()

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.collection.compute())
        self.collection.reset()


class Pair(Task):
    """A batch of two loaders."""

    def loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, dict):
            return super().loss(batch)
        (x, y), (other, _) = batch["a"], batch["b"]
        return super().loss((x, y)) + self.net(other).std(0).mean()


class Pictures(nn.Module):
    """A convolution whose weights have the colours last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Flatten(),
            nn.Linear(8, NUM_CLASSES),
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last))


class Momentum(Task):
    """A teacher that follows the net after each step, and a hook that learns from the outputs."""

    def __init__(self) -> None:
        super().__init__(mlp(nn.BatchNorm1d(16), nn.Dropout(0.3)), class_weights)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.mean_loss = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        loss = super().training_step(batch, batch_idx)
        return (loss + F.mse_loss(self.net(batch[0]), target)) / self.mean_loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(other, 0.1)
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * float(outputs["loss"])


class Compiled(Task):
    """A net that torch compiles."""

    def __init__(self) -> None:
        super().__init__(mlp(nn.BatchNorm1d(16), nn.Dropout(0.3)), class_weights)
        # Processes that compile would wait for each other in a fork.
        inductor.compile_threads = 1
        self.net.compile(dynamic=False)


ROWS = [
    Row("BatchNorm, Dropout, class weights", norm_and_dropout, exact),
    Row("the same in bf16-mixed", norm_and_dropout, exact, {"precision": "bf16-mixed"}),
    Row("the same in 64-true", norm_and_dropout, exact, {"precision": "64-true"}),
    Row("unequal and empty slices", of(class_weights), partial(exact, 61, 186)),
    Row("`ignore_index`, label smoothing", of(ignoring), exact),
    Row("Dice", of(dice), exact),
    Row("InfoNCE, noise drawn by the step", lambda: Contrast(mlp(), dice), exact),
    Row("RMSE", of(rmse), exact),
    Row("tied embedding, attention, LayerNorm", lambda: Task(Attention(), class_weights), exact),
    Row(
        "codebook in a buffer",
        lambda: Task(mlp(Codebook(), nn.BatchNorm1d(16)), class_weights), exact,
    ),
    Row("counter and running loss in attributes", Scaled, exact),
    Row(
        "`accumulate_grad_batches=2`", norm_and_dropout, partial(exact, 32),
        {"accumulate_grad_batches": 2},
    ),
    Row(
        "`split_batches`, loader processes, random transforms", of(class_weights),
        partial(ordinary, 61), {"split_batches": True},
    ),
    Row("an ordinary DataLoader", norm_and_dropout, partial(ordinary, 8)),
    Row(
        "L-BFGS, a schedule of each step, clipping",
        lambda: Scheduled(mlp(nn.Dropout(0.3)), class_weights), exact,
        {"gradient_clip_val": 0.5},
    ),
    Row("experts that few slices use", lambda: Task(Mixture(), class_weights), exact),
    Row("torchmetrics, EpochMean", Measured, exact),
    Row("two training loaders", lambda: Pair(mlp(nn.Dropout(0.3)), class_weights), several),
    # To compile takes long.
    Row("`torch.compile`, on 1 and 2 ranks", Compiled, exact, ranks=(1, 2)),
    Row(
        "moving average of the weights", norm_and_dropout, exact,
        {"callbacks": lambda: [EMAWeightAveraging(decay=0.9)]},
    ),
    Row("channels last, clipping", lambda: Task(Pictures(), class_weights), exact),
    Row("a large net", lambda: Task(large(), class_weights), exact),
    Row("a teacher that follows", Momentum, exact),
]  # fmt: skip

CONTROL = Row(
    "control: no virtual ranks", lambda: Task(mlp(nn.BatchNorm1d(16)), F.cross_entropy), exact,
    {"virtual_ranks": None},
)  # fmt: skip
