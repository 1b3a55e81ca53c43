"""``samestep.mean`` and ``gather_batch`` make the step of the whole batch on any number of ranks.

``python -m labs.losses`` trains many more losses, on 1, 2 and 3 ranks.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import samestep
from library.tests.kit import fit, on_ranks, rows, weights
from samestep import BatchLoader, losses
from samestep.data.sampler import split
from samestep.errors import ConfigError
from samestep.ranks import environment, process_group
from samestep.run_spec import KNOWN_DIFFERENCES

SCALES = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)


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


class Queue(Model):
    """Compares samples with those of the steps before, as MoCo does."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.register_buffer("queue", torch.ones(12, 3, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        keys = self.net(batch[0])
        loss = (keys @ self.queue.T).square().mean()
        self.queue = torch.cat([samestep.gather_batch(keys.detach()), self.queue])[:12]
        return loss


def ordinary() -> Any:
    """Batches of 9, which two ranks cannot share equally; the last has 6."""
    return DataLoader(make_data(), batch_size=9, shuffle=True)


def cut() -> Any:
    """Steps of 20 samples, in 3 batches of 6 or 7."""
    return BatchLoader(make_data(), 20, shuffle=True, seed=3, accumulate_grad_batches=3)


ACCUMULATES = {"accumulate_grad_batches": 3}
RUNS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any], dict[str, Any]]] = {
    "clipped": (class_weights, ordinary, {"gradient_clip_val": 0.1}),
    "accumulated": (class_weights, ordinary, ACCUMULATES),
    "cut": (class_weights, cut, ACCUMULATES),
    "cut, scaled": (class_weights, cut, {"precision": "16-mixed"} | ACCUMULATES),
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
    train("queue, gathered", Queue(), ordinary())
    if num == 2:
        train("sharded", Model(class_weights), ordinary(), strategy="fsdp", gradient_clip_val=0.1)


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
@pytest.mark.parametrize("name", [*RUNS, "queue, gathered"])
def test_two_ranks_take_the_steps_of_one(trained, name: str):
    (one, _), (two, said) = trained[1], trained[2]
    assert difference(two / name, one / name) < 1e-12
    # What accumulation cuts is compared with whole batches.
    assert bool(said[name]) == ("cut" in name)


@pytest.mark.program
def test_a_sharded_model_takes_the_same_steps(trained):
    assert difference(trained[2][0] / "sharded", trained[1][0] / "clipped") < 1e-12


# -- What needs no ranks ---------------------------------------------------------------------------


def test_an_accumulated_batch_counts_by_its_samples(tmp_path: Path):
    data = make_data(10)
    loader = BatchLoader(data, 10, accumulate_grad_batches=3)
    options = {"allow": KNOWN_DIFFERENCES, "max_epochs": 1} | ACCUMULATES
    fit(tmp_path, lambda: Model(class_weights), lambda: loader, **options)
    module = Model(class_weights)
    loss = torch.tensor(0.0)
    for x, y in zip(*(tensor.split([3, 3, 4]) for tensor in data.tensors), strict=True):
        loss = loss + len(x) / 10 * class_weights(module.net(x), x, y)
    loss.backward()
    found = weights(tmp_path)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach() - 0.1 * parameter.grad)


def test_a_mean_on_one_rank_is_the_mean():
    values = torch.tensor([1.0, float("nan"), 4.0], requires_grad=True)
    mean = samestep.mean(values, torch.tensor([1, 0, 2]))
    assert mean.item() == 3
    mean.backward()
    assert values.grad.tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert float(samestep.mean(torch.ones(3), torch.zeros(3))) == 0
    assert samestep.mean(torch.ones(3, dtype=torch.float16)).dtype == torch.float32


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
