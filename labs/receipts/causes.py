"""Programs with state that no checkpoint holds, each in a place where people have put it.

Each cause is a LightningModule, or a DataModule beside the plain module. ``read`` and ``write`` are
its state: with them a twin of each, which ``kept`` makes, has it in the checkpoint.
"""

import functools
import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from samestep import BatchLoader


class Regression(L.LightningModule):
    """As in tutorials; the causes change its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.change(F.mse_loss(self.net(x), y))

    def change(self, loss: Tensor) -> Tensor:
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Table(Dataset[tuple[Tensor, Tensor]]):
    """x ``[36, 5]``, and the sum of its squares: 9 batches of 4."""

    def __init__(self) -> None:
        self.x = torch.randn(36, 5, generator=torch.Generator().manual_seed(0))
        self.y = self.x.square().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Tables(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return BatchLoader(self.table(), 4, shuffle=True, drop_last=True, seed=7)

    def table(self) -> Dataset[Any]:
        return Table()


# -- In the module of Python -----------------------------------------------------------------------

average = 1.0
"""Of the losses so far."""


class Global(Regression):
    """A loss that is divided by its running mean."""

    def change(self, loss: Tensor) -> Tensor:
        global average
        average = 0.9 * average + 0.1 * loss.item()
        return loss / average

    def read(self) -> Any:
        return average

    def write(self, state: Any) -> None:
        global average
        average = state


class ClassAttribute(Regression):
    """A temperature that falls, kept where all instances see it."""

    temperature = 1.0

    def change(self, loss: Tensor) -> Tensor:
        ClassAttribute.temperature *= 0.99
        return loss / self.temperature

    def read(self) -> Any:
        return ClassAttribute.temperature

    def write(self, state: Any) -> None:
        ClassAttribute.temperature = state


def make_warmup() -> Callable[..., Any]:
    step = 0

    def warmup() -> float:
        nonlocal step
        step += 1
        return min(1.0, step / 100)

    return warmup


warmup = make_warmup()


class Closure(Regression):
    """A weight of the loss that a closure counts up."""

    def change(self, loss: Tensor) -> Tensor:
        return loss * warmup()

    def read(self) -> Any:
        return warmup.__closure__[0].cell_contents  # type: ignore[attr-defined]

    def write(self, state: Any) -> None:
        warmup.__closure__[0].cell_contents = state  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1)
def scale_of(name: str) -> list[float]:
    return []


class Cache(Regression):
    """The largest loss so far, in what a cached function has returned."""

    def change(self, loss: Tensor) -> Tensor:
        scale_of("loss").append(loss.item())
        return loss / max(scale_of("loss"))

    def read(self) -> Any:
        return scale_of("loss")

    def write(self, state: Any) -> None:
        scale_of("loss").extend(state)


class Teacher:
    """Weights that follow those of a student, in a plain object."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Linear(5, 1)

    def follow(self, target: Tensor) -> None:
        with torch.no_grad():
            self.net.bias.mul_(0.9).add_(target, alpha=0.1)


teacher = Teacher()


class HiddenWeights(Regression):
    """A teacher that is no part of the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        preds = self.net(x)
        teacher.follow(preds.mean().detach())
        return F.mse_loss(preds, y) + F.mse_loss(preds, teacher.net(x).detach())

    def read(self) -> Any:
        return teacher.net.bias.detach().clone()

    def write(self, state: Any) -> None:
        teacher.net.bias.data.copy_(state)


rng = np.random.default_rng(0)


class Generator(Regression):
    """Mixup by a random generator of its own, which nothing seeds for a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        part = float(rng.beta(0.4, 0.4))
        mixed = [part * tensor + (1 - part) * tensor.flip(0) for tensor in batch]
        return super().training_step(mixed, batch_idx)

    def read(self) -> Any:
        return json.dumps(rng.bit_generator.state)

    def write(self, state: Any) -> None:
        rng.bit_generator.state = json.loads(state)


# -- In objects that cannot be copied --------------------------------------------------------------


def curriculum() -> Iterator[float]:
    """Harder and harder."""
    step = 0
    while True:
        step += 1
        yield min(1.0, 0.1 * step)


class Iteration(Regression):
    """A schedule that is a generator of Python, of which no position can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = curriculum()
        self.num_read = 0

    def change(self, loss: Tensor) -> Tensor:
        self.num_read += 1
        return loss * next(self.schedule)

    def read(self) -> Any:
        return self.num_read

    def write(self, state: Any) -> None:
        self.num_read = state
        for _ in range(state):
            next(self.schedule)


class OfAnExtension(Regression):
    """A noise that is hashed from all losses so far, by an object of C."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.sha256()
        self.hashed = ""

    def change(self, loss: Tensor) -> Tensor:
        text = f"{loss.item()} "
        self.hashed += text
        self.hash.update(text.encode())
        return loss * (1 + self.hash.digest()[0] / 256)

    def read(self) -> Any:
        return self.hashed

    def write(self, state: Any) -> None:
        self.hashed = state
        self.hash.update(state.encode())


class Lookahead(torch.optim.SGD):
    """Goes half of the way back to slow weights every five steps; forgets both in a checkpoint."""

    keeps: ClassVar[bool] = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.add_(parameter.detach() - slow, alpha=0.5)
                parameter.data.copy_(slow)
        return loss


class Optimizer(Regression):
    """A wrapper of an optimizer whose state is not in its ``state_dict``."""

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=0.02, momentum=0.9)

    def read(self) -> Any:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        return [optimizer.num_steps, optimizer.slow]

    def write(self, state: Any) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.num_steps, optimizer.slow = state


gradient_scale = 1.0


class GradientHook(Regression):
    """A scale of the gradient that falls, and which the loss does not show."""

    def on_after_backward(self) -> None:
        global gradient_scale
        gradient_scale *= 0.99
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad *= gradient_scale

    def read(self) -> Any:
        return gradient_scale

    def write(self, state: Any) -> None:
        global gradient_scale
        gradient_scale = state


# -- Outside of the process ------------------------------------------------------------------------


class File(Regression):
    """The hardest loss so far, in a file that a killed process has left ahead of its checkpoint."""

    path = Path("hardest.json")

    def change(self, loss: Tensor) -> Tensor:
        seen = json.loads(self.path.read_text()) if self.path.exists() else []
        self.path.write_text(json.dumps([*seen, loss.item()]))
        return loss / (1 + len(seen))

    def read(self) -> Any:
        return self.path.read_text() if self.path.exists() else "[]"

    def write(self, state: Any) -> None:
        self.path.write_text(state)


class Environment(Regression):
    """A step that is counted in the environment, where a library reads it."""

    def change(self, loss: Tensor) -> Tensor:
        os.environ["STEPS_DONE"] = str(int(os.environ.get("STEPS_DONE", 0)) + 1)
        return loss / int(os.environ["STEPS_DONE"])

    def read(self) -> Any:
        return os.environ.get("STEPS_DONE", "0")

    def write(self, state: Any) -> None:
        os.environ["STEPS_DONE"] = state


class Clock(Regression):
    """A weight that falls with the time of day."""

    started = time.time()

    def change(self, loss: Tensor) -> Tensor:
        return loss / (1 + self.seconds())

    def seconds(self) -> float:
        return time.time() - self.started


class StoppedClock(Clock):
    """Its twin."""

    def seconds(self) -> float:
        return 1.0


class Entropy(Regression):
    """A noise that the machine makes, which no seed repeats."""

    draw: ClassVar[Callable[[], float]] = random.SystemRandom().random

    def change(self, loss: Tensor) -> Tensor:
        return loss * (1 + 0.1 * self.draw())


class Seeded(Entropy):
    """Its twin."""

    draw = random.random


# -- In the data -----------------------------------------------------------------------------------

num_samples_read = 0


class Counting(Table):
    """Noise that grows with the samples that all data sets have given."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        global num_samples_read
        num_samples_read += 1
        x, y = super().__getitem__(index)
        return x + 0.001 * num_samples_read, y


class CountingData(Tables):
    def table(self) -> Dataset[Any]:
        return Counting()

    def read(self) -> Any:
        return num_samples_read

    def write(self, state: Any) -> None:
        global num_samples_read
        num_samples_read = state


class InPlace(Table):
    """Samples that each epoch normalizes once more, in the memory of the data set."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.x[index] *= 0.99
        return self.x[index], self.y[index]


class InPlaceData(Tables):
    def __init__(self) -> None:
        super().__init__()
        self.samples = InPlace()

    def table(self) -> Dataset[Any]:
        return self.samples

    def read(self) -> Any:
        return self.samples.x.clone()

    def write(self, state: Any) -> None:
        self.samples.x.copy_(state)


class Cause(NamedTuple):
    """A row of the table.

    name: where the state is.
    model, data: the program.
    says: what the note must name.
    twin: the program without the cause, if it is no state that could be kept.
    """

    name: str
    model: type[L.LightningModule]
    data: type[L.LightningDataModule] = Tables
    says: str = "another loss"
    twin: type[L.LightningModule] | None = None


CAUSES = [
    Cause("a global variable", Global),
    Cause("a class attribute", ClassAttribute),
    Cause("a variable of a closure", Closure),
    Cause("what `lru_cache` holds", Cache),
    Cause("weights outside of the module", HiddenWeights),
    Cause("a random generator of a Python module", Generator),
    Cause("a generator (`yield`)", Iteration),
    Cause("an object of a C extension", OfAnExtension),
    Cause("an optimizer that forgets its state", Optimizer),
    Cause("a hook on gradients", GradientHook, says="another gradient"),
    Cause("a file that training writes", File),
    Cause("the environment", Environment),
    Cause("the time of day", Clock, twin=StoppedClock),
    Cause("noise of the machine", Entropy, twin=Seeded),
    Cause("a counter of the data set", Regression, CountingData, "other samples"),
    Cause("samples changed in place", Regression, InPlaceData, "other samples"),
]


def kept(owner: type[Any]) -> type[Any]:
    """The same program with its state in the checkpoint."""

    class Kept(owner):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state of the cause"] = self.read()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["state of the cause"]

        def on_train_start(self) -> None:
            # Not before: only here an optimizer exists.
            if hasattr(self, "loaded"):
                self.write(self.loaded)

    return Kept


def kept_data(owner: type[Any]) -> type[Any]:
    """The same DataModule with its state in the checkpoint."""

    class KeptData(owner):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {"state of the cause": self.read()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.write(state_dict["state of the cause"])

    return KeptData


def parts_of(name: str, *, is_kept: bool) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The module and the data of a cause, or of its twin."""
    (cause,) = (cause for cause in CAUSES if cause.name == name)
    model, data = cause.model, cause.data
    if is_kept and cause.twin is not None:
        model = cause.twin
    elif is_kept and data is not Tables:
        data = kept_data(data)
    elif is_kept:
        model = kept(model)
    return model(), data()
