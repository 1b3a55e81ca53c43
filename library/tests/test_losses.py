"""``samestep.mean`` and ``gather_batch`` make the step of the whole batch on any number of ranks.

``python -m labs.losses`` trains many more losses, on 1, 2 and 3 ranks.
"""

import dataclasses
import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import samestep
from library.tests.kit import check_same, fit, on_ranks, rows, weights
from samestep import BatchLoader, losses
from samestep.data.sampler import split
from samestep.errors import ConfigError, RunError
from samestep.losses import AccumulatedMean
from samestep.ranks import environment, process_group
from samestep.run_spec import KNOWN_DIFFERENCES

SCALES = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
ALL = list(KNOWN_DIFFERENCES)


def make_data(num: int = 60) -> TensorDataset:
    x = torch.randn(num, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 1).long() + (x[:, 1] > 0.5).long())


# -- Losses as their authors would write them, and with samestep -----------------------------------


def each(z, y, **options):
    return F.cross_entropy(z, y, reduction="none", **options)


def class_weights(z, x, y):
    return samestep.mean(each(z, y), SCALES[y])


def rare_targets(z, x, y):
    """Most slices have no target at all."""
    y = torch.where(x[:, 0] > 1, y, -100)
    return 2 * samestep.mean(each(z, y), y != -100)


def tokens(z, x, y):
    mask = torch.arange(4) < (y[:, None] + 1)
    return samestep.mean((z[:, :1] - x).square(), mask)


def two_means(z, x, y):
    return class_weights(z, x, y) + 0.3 * tokens(z, x, y) + F.mse_loss(z[:, 0], x[:, 0])


def rmse(z, x, y):
    return samestep.mean((z[:, 0] - x[:, 0]).square()).sqrt()


def variance(z, x, y):
    """A mean that depends on a mean."""
    return samestep.mean((z - samestep.mean(z)).square())


def product(z, x, y):
    """Each rank multiplies the mean of all samples by that of its own."""
    return samestep.mean(z.square()) * z.exp().mean()


def learned_weights(z, x, y):
    return samestep.mean(z[:, 0].square(), z[:, 1].sigmoid())


def contrastive(z, x, y):
    z = samestep.gather_batch(F.normalize(z, dim=1))
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(z)))


def own_rows(z, x, y):
    """Each rank compares its samples with all, so the gradient of a sample is on every rank."""
    return (z @ samestep.gather_batch(z).T).logsumexp(1).mean()


def same_class(z, x, y):
    """Gathers integers and truths too."""
    is_large = samestep.gather_batch(x[:, 0] > 0)
    z, y = samestep.gather_batch(z), samestep.gather_batch(y)
    is_pair = (y[:, None] == y) & is_large
    return (torch.cdist(z, z + 1) * is_pair).mean()


def naive_ignore(z, x, y):
    return F.cross_entropy(z, torch.where(x[:, 0] > 0, y, -100))


def naive_weights(z, x, y):
    """Makes a tensor, which has as many bits as Lightning says."""
    return F.cross_entropy(z, y, weight=torch.tensor([1.0, 5.0, 0.2]))


def naive_sum(z, x, y):
    return each(z, y).sum() / 12


def plain(z, x, y):
    return F.cross_entropy(z, y)


LOSSES = [
    plain, class_weights, rare_targets, tokens, two_means, rmse, variance, product,
    learned_weights, contrastive, own_rows, same_class,
]  # fmt: skip


def compare_gradients() -> None:
    """On each rank, compare the gradient of the slices of all ranks with that of their batch."""
    process_group.init("cpu", 60)
    with process_group.shared_errors():
        rank, world_size = environment.rank(), environment.world_size()
        x, y = make_data(10).tensors
        lengths = split(len(x), (1.0,) * world_size)
        start = sum(lengths[:rank])
        own = slice(start, start + lengths[rank])
        for loss in LOSSES:
            module = Model(loss)
            losses.begin_batch(is_alone=True)
            value = loss(module.net(x), x, y)
            expected = torch.autograd.grad(value, module.parameters())
            losses.begin_batch()
            of_slice = loss(module.net(x[own]), x[own], y[own])
            # As ``SliceWeighting`` and DDP do.
            share = lengths[rank] / len(x)
            for wanted, found in zip(
                expected, torch.autograd.grad(of_slice * share, module.parameters()), strict=True
            ):
                dist.all_reduce(found)
                print(loss.__name__, float((found - wanted).abs().max()) < 1e-14)


@pytest.mark.program
@pytest.mark.parametrize("num", [2, 3])
def test_slices_have_the_gradient_of_the_batch(num: int):
    done = on_ranks(compare_gradients, num=num)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {f"{loss.__name__} True" for loss in LOSSES}


class Model(L.LightningModule):
    validation_step = None

    def __init__(self, loss: Callable[..., Tensor], middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), middle or nn.Tanh(), nn.Linear(8, 3)).double()
        self.loss = loss

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self.net(x), x, y)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Curious(Model):
    """Keeps, counts and draws whatever it can in a step."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.metric = MeanMetric()
        self.count, self.seen = 0, []
        self.generator = torch.Generator().manual_seed(3)
        self.norm = nn.BatchNorm1d(4).double()

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.seen.append(float(batch[0].sum()))
        noise = float(np.random.rand() + random.random() + torch.rand(()))
        noise += float(torch.rand((), generator=self.generator))
        batch = [self.norm(batch[0]) + 0.01 * noise, batch[1]]
        self.metric(batch[0].mean())
        self.log("metric", self.metric, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx) + 0.001 * self.count


class Gan(Model):
    """Two losses by hand, one of which is no mean."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        for loss in (plain, naive_ignore):
            optimizer.zero_grad()
            self.manual_backward(loss(self.net(x), x, y))
            optimizer.step()


class Queue(Model):
    """Compares samples with those of the steps before, as MoCo does."""

    def __init__(self, gathers: bool) -> None:
        super().__init__(plain)
        self.register_buffer("queue", torch.ones(12, 3, dtype=torch.float64))
        self.mean, self.gathers = 0.0, gathers

    def training_step(self, batch, batch_idx):
        keys = self.net(batch[0])
        loss = (keys @ self.queue.T).square().mean()
        keys = samestep.gather_batch(keys.detach()) if self.gathers else keys.detach()
        self.queue = torch.cat([keys, self.queue])[:12]
        self.mean = float(keys.mean())
        return loss


class Codebook(Model):
    """Moves the codes towards the samples that are next to them, as VQ-VAE does."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.register_buffer("codes", torch.eye(3, 4, dtype=torch.float64))
        self.register_buffer("sizes", torch.ones(3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        x, y = batch
        nearest = torch.cdist(x, self.codes).argmin(1)
        loss = self.loss(self.net(x + self.codes[nearest]), x, y)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 3).to(x)
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(chosen.T @ x / self.sizes[:, None], alpha=0.1)
        return loss


class Augmented(Model):
    """Draws random numbers when its batch is on the device, as kornia's users do."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]]


class Converts(Model):
    """Changes its batch there, and draws nothing."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [2 * batch[0], batch[1]]


def ordinary() -> Any:
    """Batches of 9, which two ranks cannot share equally; the last has 6."""
    return DataLoader(make_data(), batch_size=9, shuffle=True)


def tiny() -> Any:
    return DataLoader(make_data(6), batch_size=2)


def cut() -> Any:
    """Steps of 20 samples, in 3 batches of 6 or 7."""
    return BatchLoader(make_data(), 20, shuffle=True, seed=3, accumulate_grad_batches=3)


def whole() -> Any:
    """The same steps, in one batch."""
    return BatchLoader(make_data(), 20, shuffle=True, seed=3)


ACCUMULATES = {"accumulate_grad_batches": 3}
RUNS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any], dict[str, Any]]] = {
    "clipped": (class_weights, ordinary, {"gradient_clip_val": 0.1}),
    "accumulated": (class_weights, ordinary, ACCUMULATES),
    "cut": (class_weights, cut, ACCUMULATES),
    "scaled": (class_weights, cut, {"precision": "16-mixed"} | ACCUMULATES),
    "two means": (two_means, ordinary, ACCUMULATES),
    "two means, cut": (two_means, cut, ACCUMULATES),
    "contrastive": (contrastive, ordinary, {"precision": "16-mixed"}),
    "contrastive, cut": (contrastive, cut, ACCUMULATES),
}


def train_all(folder: str, num: int) -> None:
    """Train on the ranks that there are, one run after the other, and say which."""

    def train(name: str, model: Model, data: Any, **options: Any) -> None:
        if environment.rank() == 0:
            print(f"== {name}", flush=True)
        options = {"max_epochs": 1, "split_batches": True} | options
        fit(Path(folder, name), lambda: model, lambda: data, **options)

    for name, (loss, data, options) in RUNS.items():
        train(name, Model(loss), data(), **options)
    train("queue, gathered", Queue(True), ordinary())
    train("converted", Converts(plain), ordinary())
    if num == 1:
        train("whole", Model(class_weights), whole())
        return
    # Their notes come before the first step.
    once = {"max_steps": 1}
    train("loss", Model(naive_ignore), ordinary(), **once)
    train("64 bits", Model(naive_weights), ordinary(), precision="64-true", **once)
    train("one sample for each rank", Model(naive_sum), tiny(), **once)
    train("batch norm", Model(plain, nn.BatchNorm1d(8)), ordinary(), **once)
    train("dropout", Model(plain, nn.Dropout(0.5)), ordinary(), **once)
    train("allowed", Model(naive_sum, nn.Dropout(0.5)), ordinary(), allow=ALL[:2], **once)
    train("by hand", Gan(plain), ordinary(), **once)
    train("queue", Queue(False), ordinary(), **once)
    train("codebook", Codebook(), ordinary(), **once)
    train("augmented", Augmented(plain), ordinary(), **once)
    train("sharded", Model(naive_ignore), ordinary(), strategy="fsdp", **once)
    train("checked", Curious(), ordinary())
    train("unchecked", Curious(), ordinary(), allow=ALL)
    train("cut, sharded", Model(class_weights), cut(), strategy="fsdp", **ACCUMULATES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, str]]]:
    """For one rank and two the runs, and the notes of each."""
    folder = tmp_path_factory.mktemp("trained")

    def train(num: int) -> tuple[Path, dict[str, str]]:
        done = on_ranks(train_all, str(folder / str(num)), num, num=num)
        assert done.returncode == 0, done.stderr
        said = {}
        for part in done.stdout.split("== ")[1:]:
            name, _, rest = part.partition("\n")
            said[name] = "\n".join(line for line in rest.splitlines() if line.startswith("Note"))
        return folder / str(num), said

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((1, 2), pool.map(train, (1, 2)), strict=True))


def difference(ours: Path, theirs: Path) -> float:
    """The largest difference of the weights, and of what was logged over the epoch."""
    a, b = weights(ours), weights(theirs)
    largest = max(float((a[name] - b[name]).abs().max()) for name in b)
    for own, other in zip(rows(ours), rows(theirs), strict=True):
        if own.get("loss"):
            largest = max(largest, abs(float(own["loss"]) - float(other["loss"])))
    return largest


@pytest.mark.program
@pytest.mark.parametrize("name", [*RUNS, "queue, gathered", "converted"])
def test_two_ranks_take_the_steps_of_one(trained, name: str):
    (one, _), (two, said) = trained[1], trained[2]
    assert difference(two / name, one / name) < 1e-12
    # What accumulation cuts is compared with whole batches.
    assert bool(said[name]) == (name in ("two means, cut", "contrastive, cut"))


@pytest.mark.program
def test_a_sharded_model_takes_the_same_steps(trained):
    assert difference(trained[2][0] / "cut, sharded", trained[1][0] / "cut") < 1e-12


@pytest.mark.program
@pytest.mark.parametrize("num", [1, 2])
def test_accumulated_batches_have_one_denominator(trained, num: int):
    own = weights(trained[num][0] / "cut")
    for name, value in weights(trained[1][0] / "whole").items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=1e-12)


@pytest.mark.program
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("loss", "the loss is not a mean"),
        ("64 bits", "the loss is not a mean"),
        ("one sample for each rank", "the loss is not a mean"),
        ("by hand", "the loss is not a mean"),
        ("sharded", "the loss is not a mean"),
        ("batch norm", "batch norm (net.1) normalizes each slice"),
        ("dropout", "random numbers of its own in a training step (net.1)"),
        ("queue", "queue by the samples"),
        ("codebook", "codes, sizes by the samples"),
        ("augmented", "in a training step (in a hook that moves the batch to the device)"),
    ],
)
def test_what_makes_other_steps_is_named_before_the_first(trained, name: str, says: str):
    (note,) = trained[2][1][name].splitlines()
    assert says in note
    assert "on 2 ranks the steps differ" in note


@pytest.mark.program
def test_what_is_allowed_is_not_printed(trained):
    assert trained[2][1]["allowed"] == ""


@pytest.mark.program
def test_one_rank_says_something_of_batches_that_are_cut_only(trained):
    said = {name for name, text in trained[1][1].items() if text}
    assert said == {"two means, cut", "contrastive, cut"}
    assert "accumulated batches make other steps" in trained[1][1]["two means, cut"]


@pytest.mark.program
def test_the_check_leaves_nothing_behind(trained):
    """Not in attributes, buffers, generators, metrics and logs, all of which this model changes."""
    folder, said = trained[2]
    assert "random numbers" in said["checked"]
    assert "batch norm" in said["checked"]
    assert said["unchecked"] == ""
    check_same(folder / "checked", folder / "unchecked")


# -- What needs no ranks ---------------------------------------------------------------------------


def test_a_mean_on_one_rank_is_the_mean():
    values = torch.tensor([1.0, float("nan"), 4.0], requires_grad=True)
    mean = samestep.mean(values, torch.tensor([1, 0, 2]))
    assert mean.item() == 3
    mean.backward()
    assert values.grad.tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert float(samestep.mean(torch.ones(3), torch.zeros(3))) == 0
    assert samestep.mean(torch.ones(3, dtype=torch.float16)).dtype == torch.float32


def test_a_mean_is_not_kept_where_nothing_is_accumulated():
    """Its gradient graph holds the activations of a whole step."""
    losses.begin_batch()
    reference = weakref.ref(samestep.mean(torch.ones(2, requires_grad=True)))
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    ("values", "scales", "says"),
    [
        (torch.ones(3, dtype=torch.long), None, r"must be floating point numbers, not torch.int64"),
        (
            torch.tensor(1.0),
            torch.ones(3),
            r"shape \(3,\) do not fit .* \(\); .*reduction=\"none\"",
        ),
    ],
)
def test_values_without_a_mean_are_one_message(values, scales, says):
    with pytest.raises(ConfigError, match=says):
        samestep.mean(values, scales)


def test_a_number_has_no_samples_to_gather():
    with pytest.raises(ConfigError, match=r"use samestep\.mean"):
        samestep.gather_batch(torch.tensor(1.0))


def test_another_kind_of_loss_within_a_run_is_an_error():
    accumulated = AccumulatedMean()
    values = torch.ones(2, requires_grad=True)
    for scales in (values.detach(), None):
        means: list[losses.Mean] = []
        losses.begin_batch(means=means)
        loss = samestep.mean(values, scales)
        if scales is None:
            means.append(dataclasses.replace(means[0], weights=values))
            with pytest.raises(RunError, match="every batch must have the same kind of loss"):
                accumulated.add(means, loss, 2, 1.0)
        else:
            accumulated.add(means, loss, 2, 1.0)
    assert accumulated.is_used
