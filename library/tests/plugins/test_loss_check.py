"""What a run says of losses and layers before its first step, and that this changes nothing."""

import random
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import samestep
from library.tests.kit import check_same, fit, on_ranks
from samestep import BatchLoader
from samestep.errors import ConfigError
from samestep.plugins import loss_check
from samestep.plugins.loss_check import CannotCompare, LossCheck, call_in_fork, copies_on_cpu, take
from samestep.ranks import environment, process_group
from samestep.run_spec import KNOWN_DIFFERENCES

SCALES = torch.tensor([1.0, 5.0, 0.2])
LOSS, RANDOM, BATCH_NORM = "the loss is not a mean", "random numbers of its own", "batch norm ("
STEP = " in a training step "


def make_data(num: int = 36) -> TensorDataset:
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 1).long() + (x[:, 1] > 0.5).long())


def ordinary() -> Any:
    """Of the first batch rank zero has 9 samples."""
    return DataLoader(make_data(), batch_size=18)


def tiny() -> Any:
    return DataLoader(make_data(6), batch_size=2)


def cut() -> Any:
    return BatchLoader(make_data(), 18, accumulate_grad_batches=2)


def pairs() -> Any:
    """The second tensor has two entries for each sample."""

    def collate(samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack(x).repeat(2, 1), torch.stack(y).repeat(2)

    return DataLoader(make_data(), batch_size=18, collate_fn=collate)


class Plain(L.LightningModule):
    validation_step = None

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *layers, nn.Linear(8, 3))

    def loss(self, z, y):
        return F.cross_entropy(z, y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self.net(x), y)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Weighted(Plain):
    """Makes a tensor, which has as many bits as the net."""

    def loss(self, z, y):
        return F.cross_entropy(z, y, weight=torch.tensor(SCALES.tolist()))


class Mended(Plain):
    def loss(self, z, y):
        return samestep.mean(F.cross_entropy(z, y, reduction="none"), SCALES.to(z)[y])


class Contrastive(Plain):
    def loss(self, z, y):
        z = samestep.gather_batch(F.normalize(z))
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))


class Ignores(Plain):
    """Some slices, and parts of them, have no target at all."""

    def loss(self, z, y):
        return F.cross_entropy(z, torch.where(torch.arange(len(y)) > 5, y, -100))


class In32Bits(Weighted):
    """Names its type of numbers, which the weights must have."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].float(), batch[1]], batch_idx)

    def loss(self, z, y):
        return F.cross_entropy(z, y, weight=SCALES)


class Noisy(Plain):
    """Draws a number for each sample."""

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0] + torch.randn_like(batch[0]), batch[1]], batch_idx)


class NoisyByNumPy(Plain):
    def training_step(self, batch, batch_idx):
        noise = torch.tensor(np.random.normal(size=(len(batch[0]), 1))).to(batch[0])
        return super().training_step([batch[0] + noise, batch[1]], batch_idx)


class Augmented(Plain):
    """Draws random numbers when its batch is on the device, as kornia's users do."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


class Converts(Plain):
    """Changes its batch there, and draws nothing."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]]


class ByHand(Weighted):
    """Two losses, one of which is no mean."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        for loss in (F.cross_entropy, self.loss):
            optimizer.zero_grad()
            self.manual_backward(loss(self.net(x), y))
            optimizer.step()


class Queue(Plain):
    """Compares samples with those of the steps before, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.ones(12, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        keys = self.net(x)
        queue = self.queue.to(keys)
        self.queue = torch.cat([keys.detach(), queue])[:12]
        return self.loss(keys, y) + (keys @ queue.T).square().mean()


class ChangesItsBatch(Plain):
    """And counts its steps."""

    def training_step(self, batch, batch_idx):
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step([batch[0].mul_(2), batch[1]], batch_idx) * self.steps


class Curious(Weighted):
    """Keeps, counts, draws and writes whatever it can in a step."""

    def __init__(self, file: Path) -> None:
        super().__init__(nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.metric = MeanMetric()
        self.count, self.seen = 0, []
        self.generator = torch.Generator().manual_seed(3)
        self.file = file

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.seen.append(float(batch[0].sum()))
        with self.file.open("a") as file:
            file.write(f"{self.count}\n")
        print("has trained")
        noise = float(np.random.rand() + random.random() + torch.rand(()))
        noise += float(torch.rand((), generator=self.generator))
        self.metric(batch[0].mean() + noise)
        self.log("metric", self.metric, on_epoch=True, on_step=False)
        self.log("count", float(self.count + len(self.seen)), on_epoch=True, on_step=True)
        loss = super().training_step([batch[0] + 0.01 * noise, batch[1]], batch_idx)
        return loss + 0.001 * self.count


ON_TWO_RANKS: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
    "class weights": (Weighted, ordinary, {}, (LOSS,)),
    "64 bits": (Weighted, ordinary, {"precision": "64-true"}, (LOSS,)),
    "32 bits": (In32Bits, ordinary, {}, (LOSS,)),
    "a part without a loss": (Ignores, ordinary, {}, (LOSS,)),
    "by hand": (ByHand, ordinary, {}, (LOSS,)),
    "accumulated, cut": (Mended, cut, {"accumulate_grad_batches": 2}, (LOSS,)),
    "a queue": (Queue, ordinary, {}, (LOSS,)),
    "plain": (Plain, ordinary, {}, ()),
    "changes its batch": (ChangesItsBatch, ordinary, {"precision": "64-true"}, ()),
    "plain, cut": (Plain, cut, {"accumulate_grad_batches": 2}, ()),
    "plain, bfloat16": (Plain, ordinary, {"precision": "bf16-true"}, ()),
    "mean": (Mended, ordinary, {}, ()),
    "gathered": (Contrastive, ordinary, {}, ()),
    "converted": (Converts, ordinary, {}, ()),
    "no dropout": (partial(Plain, nn.Dropout(0.0)), ordinary, {}, ()),
    "spectral norm": (partial(Plain, nn.utils.spectral_norm(nn.Linear(8, 8))), ordinary, {}, ()),
    "dropout": (partial(Plain, nn.Dropout(0.5)), ordinary, {}, (RANDOM + STEP + "(net.2)",)),
    "noise": (Noisy, ordinary, {}, (RANDOM,)),
    "noise by NumPy": (NoisyByNumPy, ordinary, {}, (RANDOM,)),
    "augmented": (Augmented, ordinary, {}, (RANDOM + STEP + "(in a hook",)),
    "batch norm": (partial(Plain, nn.BatchNorm1d(8)), ordinary, {}, (BATCH_NORM + "net.2)",)),
    "cannot be split": (partial(Weighted, nn.BatchNorm1d(8)), pairs, {}, (BATCH_NORM,)),
    "one sample for each rank": (partial(Weighted, nn.Dropout(0.5)), tiny, {}, (RANDOM,)),
    "sharded": (partial(Weighted, nn.Dropout(0.5)), ordinary, {"strategy": "fsdp"}, (RANDOM,)),
    "allowed": (partial(Weighted, nn.Dropout(0.5)), ordinary, {"allow": ["loss"]}, (RANDOM,)),
}  # fmt: skip
"""Model, data, options of the run, and what its notes say."""


def train_all(folder: str, names: list[str]) -> None:
    """Train on the ranks that there are, one run after the other, and say which."""
    for name in names:
        model, data, options, _ = ON_TWO_RANKS[name]
        if environment.rank() == 0:
            print(f"== {name}", flush=True)
        fit(Path(folder, name), model, data, split_batches=True, max_steps=1, **options)
    for name, allow in (("checked", ()), ("unchecked", KNOWN_DIFFERENCES)):
        if environment.rank() == 0:
            print(f"== {name}", flush=True)
        file = Path(folder, f"{name}-{environment.rank()}")
        fit(Path(folder, name), partial(Curious, file), ordinary, split_batches=True, allow=allow)


class Said(dict[str, str]):
    """What each run has printed, by its name."""

    folder: Path

    def notes(self, name: str) -> list[str]:
        return [line for line in self[name].splitlines() if line.startswith("Note")]


def run(folder: Path, num: int, *names: str) -> Said:
    done = on_ranks(train_all, str(folder), list(names), num=num)
    assert done.returncode == 0, done.stderr
    said = Said(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    said.folder = folder
    return said


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return run(tmp_path_factory.mktemp("two"), 2, *ON_TWO_RANKS)


@pytest.mark.program
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_what_makes_other_steps_is_named_before_the_first(two: Said, name: str):
    expected = ON_TWO_RANKS[name][3]
    notes = two.notes(name)
    assert len(notes) == len(expected)
    for note, says in zip(notes, expected, strict=True):
        assert says in note
        assert "virtual_ranks=V takes the same ones on any number of ranks" in note


@pytest.mark.program
def test_the_note_has_the_loss_of_the_slice_and_the_mean_of_its_parts(two: Said):
    module = Weighted()
    x, y = make_data().tensors
    of_whole, of_first, of_second = (
        float(module.loss(module.net(x[part]), y[part]).detach())
        for part in (slice(9), slice(4), slice(4, 9))
    )
    (note,) = two.notes("class weights")
    found = [
        float(text) for text in note.split() if text.replace(".", "").isdigit() and "." in text
    ]
    assert found == pytest.approx([of_whole, (4 * of_first + 5 * of_second) / 9], rel=1e-5)
    assert "for 9 samples" in note


@pytest.mark.program
def test_the_check_leaves_nothing_behind(two: Said):
    """Not in attributes, buffers, generators, metrics, logs and files; this module changes all."""
    assert len(two.notes("checked")) == 2
    assert two.notes("unchecked") == []
    # Each rank trains four steps in each run.
    assert sum(text.count("has trained") for text in two.values()) == 4 * 2 * 2
    check_same(two.folder / "checked", two.folder / "unchecked")
    for rank in range(2):
        assert (two.folder / f"checked-{rank}").read_text() == "1\n2\n3\n4\n"


@pytest.mark.program
def test_one_rank_says_something_of_batches_that_are_cut_only(tmp_path: Path):
    names = "class weights", "dropout", "plain, cut", "accumulated, cut"
    said = run(tmp_path, 1, *names)
    assert [len(said.notes(name)) for name in names] == [0, 0, 0, 1]


# -- What needs no ranks ---------------------------------------------------------------------------


def test_unknown_names_are_rejected():
    with pytest.raises(ConfigError, match="allow: state is not known; choose from loss, random"):
        LossCheck(["state"])


@pytest.mark.parametrize(("virtual_ranks", "is_checked"), [(None, True), (4, False)])
def test_virtual_ranks_need_no_check(virtual_ranks: int | None, is_checked: bool):
    spec: Any = SimpleNamespace(accumulates=True, allow=(), virtual_ranks=virtual_ranks)
    assert (loss_check.callback(spec) is not None) == is_checked


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ([torch.arange(4), torch.tensor(7)], [torch.arange(2), torch.tensor(7)]),
        ({"x": torch.arange(4), "n": 3}, {"x": torch.arange(2), "n": 3}),
    ],
)
def test_samples_of_a_batch(batch: Any, expected: Any):
    assert str(take(batch, 4, slice(2))) == str(expected)


def test_a_batch_that_is_not_made_of_samples_cannot_be_split():
    with pytest.raises(CannotCompare, match=r"4 samples, and a tensor of shape \(9,\)"):
        take([torch.ones(4), torch.ones(9)], 4, slice(2))


def test_a_fork_gets_every_tensor_of_a_device_on_the_cpu():
    with FakeTensorMode():
        module = nn.Linear(2, 2, device="cuda")
        module.register_buffer("shift", torch.ones(2, device="cuda"))
        module.scale = torch.ones(2, device="cuda")  # of a loss, moved by hand
        module.on_cpu = torch.ones(2)
        copies = copies_on_cpu(module)
    assert {tensor.device.type for tensor, _ in copies} == {"cuda"}
    assert [copy.device.type for _, copy in copies] == ["cpu"] * 4


def fork_all() -> None:
    changed: list[int] = []

    def change() -> Any:
        changed.append(1)
        print("not seen")
        return len(changed)

    def fail() -> Any:
        raise ValueError("wrong")

    def talk() -> Any:
        value = torch.ones(1)
        dist.all_reduce(value)

    now = time.monotonic()
    print(call_in_fork(change, now + 100), len(changed))
    for function, seconds in ((fail, 100), (partial(time.sleep, 1000), 0.1), (talk, 100)):
        try:
            call_in_fork(function, now + seconds)
        except CannotCompare as error:
            print(error)
    value = torch.ones(1)
    dist.all_reduce(value)
    print(float(value))


def fork_in_ranks() -> None:
    process_group.init("cpu", 60)
    with process_group.shared_errors():
        fork_all()


@pytest.mark.program
def test_a_fork_changes_nothing_and_knows_no_ranks():
    done = on_ranks(fork_in_ranks)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[: len(said) // 2] == said[len(said) // 2 :]
    first, failed, hung, alone, summed = said[: len(said) // 2]
    assert first == "1 0"
    assert failed == "ValueError: wrong"
    assert hung.startswith("it did not end within")
    assert "process group has not been initialized" in alone
    assert summed == "2.0"
