"""Virtual ranks: a step has the same bits on any number of ranks."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

import samestep
from library.tests.kit import (
    Net,
    Normalized,
    batches,
    check_exact,
    check_same,
    fit,
    on_ranks,
    weights,
)
from samestep import Trainer
from samestep.callbacks import machine
from samestep.errors import ConfigError
from samestep.ranks import environment, virtual


class Everything(Normalized):
    """Its loss is no mean, and depends on all that a rank keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = torch.nn.Linear(1, 1)  # in the loss of some slices only
        self.register_buffer("codes", torch.linspace(-1, 1, 4))
        self.num_steps, self.running = 0, 1.0
        self.metrics = MetricCollection([BinaryAccuracy(), BinaryF1Score()], prefix="val_")
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        x = batch[0].float()
        self.num_steps += 1
        with torch.no_grad():
            self.codes.lerp_(x.mean() / 10, 0.1)
        out = self.head(self.body(x + 0.1 * torch.randn_like(x)))
        loss = (out - 0.1 * x).square().mean().sqrt() * (1 + 0.01 * self.codes.sum())
        if (x > 12).any():
            loss = loss + 0.1 * self.rare(x).square().mean()
        self.running = 0.9 * self.running + 0.1 * loss.item()
        self.sums.update(len(x), loss_of_all=loss.detach() * len(x))
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.mean(loss.detach())
        self.log("train_mean", self.mean, on_step=False, on_epoch=True)
        return loss * self.running * (1 + 0.1 * math.sin(self.num_steps))

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x = batch[0].float()
        self.metrics.update(torch.sigmoid(self.head(self.body(x)))[:, 0], (x[:, 0] > 7).int())
        self.log("val_noise", torch.rand(()))

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


class Short(Everything):
    """Takes slices of one sample, which have no variance."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = torch.nn.LayerNorm(4)


class Loader(DataLoader[Any]):
    """An ordinary one, whose samples are transformed at random."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__([*range(30)], size, shuffle=True, collate_fn=noisy, **options)


def noisy(samples: list[int]) -> list[Tensor]:
    return [torch.tensor(samples, dtype=torch.float32)[:, None]]


RUNS: dict[str, tuple[type[Net], Any, dict[str, Any]]] = {
    "equal slices": (Everything, lambda: batches(48, 12), {}),
    "unequal slices, and an empty one": (Short, lambda: batches(27, 12), {}),
    "split_batches": (Everything, lambda: Loader(11, drop_last=True), {"split_batches": True}),
    "dealt": (Everything, lambda: Loader(3), {}),
    "accumulated": (Everything, lambda: batches(48, 12), {"accumulate_grad_batches": 2}),
    "by Lightning's own step": (Everything, lambda: batches(48, 12), {"profiler": "simple"}),
    "measured shares": (Everything, lambda: batches(48, 12), {"shares": "auto"}),
    "given shares": (Everything, lambda: batches(48, 12), {"shares": [1.0, 2.5]}),
}
V = 4


def train(folder: str, which: str, *places: tuple[int, int]) -> None:
    model, data, options = RUNS[which]
    if environment.world_size() != 2:
        options = {name: value for name, value in options.items() if name != "shares"}
    options = {"virtual_ranks": V, "gradient_clip_val": 0.5} | options
    if places:
        options["callbacks"] = lambda: [Stop(*places)]
    fit(Path(folder), model, data, **options)


@pytest.mark.parametrize("which", list(RUNS)[:-2])
def test_a_run_that_is_interrupted_is_exact(tmp_path: Path, which: str):
    model, data, options = RUNS[which]
    check_exact(tmp_path, model, data, (0, 1), (1, 0), virtual_ranks=V, **options)


@pytest.mark.program
@pytest.mark.parametrize("which", RUNS)
def test_any_number_of_ranks_has_the_same_bits(tmp_path: Path, which: str):
    """Also unequal numbers of slices."""
    train(f"{tmp_path}/1", which)
    for num in (2, 3):
        done = on_ranks(train, f"{tmp_path}/{num}", which, num=num)
        assert done.returncode == 0, done.stderr
        check_same(tmp_path / f"{num}", tmp_path / "1")


def train_by_unlike_commands(folder: str) -> None:
    shares: Any = [1.0, 2.5] if environment.rank() == 0 else "equal"
    fit(Path(folder), Net, virtual_ranks=V, shares=shares)


@pytest.mark.program
def test_slices_are_dealt_by_the_command_of_rank_zero(tmp_path: Path):
    """Each node has a command of its own; by two of them a slice would have two ranks, or none."""
    done = on_ranks(train_by_unlike_commands, f"{tmp_path}/2")
    assert done.returncode == 0, done.stderr
    fit(tmp_path / "1", Net, virtual_ranks=V)
    check_same(tmp_path / "2", tmp_path / "1")


class Stop(L.Callback):
    """Ends the process at a step, by a signal."""

    def __init__(self, step: int, signum: int) -> None:
        self.step, self.signum = step, signum

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), self.signum)


@pytest.mark.program
def test_another_number_of_ranks_continues_with_the_same_bits(tmp_path: Path):
    """Twice within an epoch."""
    which = "unequal slices, and an empty one"
    train(f"{tmp_path}/whole", which)
    for num, step, signum in ((3, 2, signal.SIGTERM), (2, 5, signal.SIGKILL)):
        done = on_ranks(train, f"{tmp_path}/parts", which, (step, int(signum)), num=num)
        assert done.returncode
    train(f"{tmp_path}/parts", which)
    check_same(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.program
def test_as_many_ranks_as_slices_take_the_steps_of_ddp(tmp_path: Path):
    """Up to rounding: DDP adds up in an order of its own."""
    for name, number in (("ddp", None), ("virtual", 2)):
        done = on_ranks(train_plain, f"{tmp_path}/{name}", number)
        assert done.returncode == 0, done.stderr
    torch.testing.assert_close(weights(tmp_path / "virtual"), weights(tmp_path / "ddp"))


def train_plain(folder: str, number: int | None) -> None:
    fit(Path(folder), Normalized, virtual_ranks=number)


def add_all(total: int, present: Callable[[int], bool]) -> list[Tensor | None]:
    """The sums of two gradients, of which the second is there for some slices, on one process."""
    tree = virtual.GradientTree(virtual.Layout((0, total), 0, is_virtual=True))
    generator = torch.Generator().manual_seed(total)
    for number in range(total):
        first, second = torch.randn(2, 7, generator=generator)
        tree.add(number, [first, second if present(number) else None])
    return tree.total([torch.zeros(7)] * 2)


@pytest.mark.parametrize("total", range(1, 10))
def test_the_sum_has_the_order_of_the_tree(total: int):
    generator = torch.Generator().manual_seed(total)
    leaves = {(n, n + 1): torch.randn(2, 7, generator=generator)[0] for n in range(total)}
    first, second = add_all(total, lambda number: False)
    assert torch.equal(first, virtual.combine(leaves, (0, total)))
    assert second is None, "no slice has used it"


@pytest.mark.parametrize(
    ("shares", "bounds"),
    [((), (0, 3, 5, 8)), ((1.0, 1.0, 6.0), (0, 1, 2, 8)), ((100.0, 1.0, 1.0), (0, 6, 7, 8))],
)
def test_slices_are_dealt_by_shares(monkeypatch: pytest.MonkeyPatch, shares, bounds):
    """Each process has one at least."""
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    virtual.use(8, shares)
    assert virtual.layout().bounds == bounds
    virtual.use(None)
    assert virtual.layout().bounds == (0, 1, 2, 3)
    virtual.leave()


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Means(Net):
    def loss(self, batch):
        return samestep.mean((self.head(self.body(batch[0].float())) - 1).square())


class Gathers(Net):
    def loss(self, batch):
        return self.all_gather(super().loss(batch), sync_grads=True).mean()


class Reduces(Net):
    def loss(self, batch):
        loss = super().loss(batch)
        torch.distributed.all_reduce(loss.detach())
        return loss


def train_reduces(folder: str) -> None:
    fit(Path(folder), Reduces, virtual_ranks=V)


@pytest.mark.program
def test_an_operation_of_all_ranks_within_a_slice_is_one_line(tmp_path: Path):
    """The ranks would wait for each other where one has more slices than another."""
    done = on_ranks(train_reduces, str(tmp_path), num=3)
    assert done.returncode
    assert "torch.distributed (allreduce_" in done.stderr
    assert "needs all slices of a batch at once" in done.stderr


class StepsEarly(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda weight: None)


class Stream(IterableDataset[Tensor]):
    def __iter__(self):
        return iter(torch.arange(16.0)[:, None])


@pytest.mark.parametrize(
    ("model", "data", "options", "says"),
    [
        (Manual, batches, {}, "with manual optimization"),
        (Means, batches, {}, "samestep.mean or samestep.gather_batch needs all slices"),
        (Gathers, batches, {}, "self.all_gather needs all slices"),
        (StepsEarly, batches, {}, "a parameter has a hook"),
        (Net, lambda: DataLoader(Stream(), 4), {}, "DataLoader gives one batch after the other"),
        (Net, batches, {"strategy": "fsdp"}, "use ddp"),
        (Net, batches, {"strategy": SingleDeviceStrategy("cpu")}, "use ddp"),
        (Net, batches, {"sync_batchnorm": True}, "needs all slices of a batch at once"),
    ],
    ids=["manual", "mean", "gather", "hook", "stream", "fsdp", "strategy", "sync_batchnorm"],
)
def test_what_needs_all_slices_at_once_is_one_line(tmp_path, model, data, options, says: str):
    with pytest.raises(ConfigError, match=says) as raised:
        fit(tmp_path, model, data, virtual_ranks=V, **options)
    assert str(raised.value).startswith(("virtual_ranks=4", "sync_batchnorm=True"))


def test_fewer_slices_than_ranks_are_rejected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    with pytest.raises(ConfigError, match="virtual_ranks=2: there are 3 ranks"):
        virtual.check(2)


def test_another_number_of_slices_is_another_run(tmp_path: Path):
    fit(tmp_path, Net, virtual_ranks=4, max_epochs=1)
    with pytest.raises(ConfigError, match="virtual_ranks"):
        fit(tmp_path, Net, virtual_ranks=8, max_epochs=2)


def test_a_run_continues_with_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """More threads add in another order."""
    before = torch.get_num_threads()
    monkeypatch.setattr(environment, "num_cpus", lambda: 9.0)
    fit(tmp_path, Net, virtual_ranks=4, max_epochs=1)
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(environment, "num_cpus", lambda: 64.0)
    fit(tmp_path, Net, virtual_ranks=4, max_epochs=2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_other_processors_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    fit(tmp_path, Net, virtual_ranks=4, max_epochs=1)
    monkeypatch.setattr(machine, "capability", lambda: "NEON")
    fit(tmp_path, Net, virtual_ranks=4, max_epochs=2)
    assert "and continues on ones with NEON" in capsys.readouterr().out


def test_all_ranks_have_as_many_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A slice must not depend on which machine has it; other instructions are said."""
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "gather", lambda own: [(8, "AVX512"), (3, "AVX2")])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    machine.Machine().setup(trainer, Net(), "fit")
    assert torch.get_num_threads() == 3
    assert "the processors of the ranks have AVX2 and AVX512" in capsys.readouterr().out
    torch.set_num_threads(before)


def test_a_step_says_what_it_is(tmp_path: Path, capsys):
    fit(tmp_path, Net, virtual_ranks=4, max_epochs=1)
    assert "Each step is the mean of 4 slices of a batch" in capsys.readouterr().out


class Hooked(Normalized):
    """Learns from what its hooks have seen of a step; logs what its slices have counted."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = torch.nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)
        self.mean = MeanMetric()
        self.running = 1.0
        self.draws = True

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.1 * torch.randn_like(batch[0])] if self.draws else batch

    def training_step(self, batch, batch_idx):
        picture = self.picture(batch[0][:, None, None].expand(-1, 2, 2, 2))
        loss = super().training_step(batch, batch_idx) + picture.square().mean() / 100
        self.mean.update(loss.detach())
        self.log("train_mean_so_far", self.mean.compute())
        # A slice may be left out.
        return None if batch[0][0] > 40 else loss / self.running

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.running = 0.9 * self.running + 0.1 * float(outputs["loss"])

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.log("train_mean", self.mean.compute())
        self.mean.reset()
        self.body[1].running_mean.data.mul_(0.5)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


def train_hooked(folder: str, optimizer: str = "Adam") -> None:
    """With two loaders of the validation, whose samples are transformed at random."""
    scores: list[dict[str, float]] = []

    class Reader(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            scores.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    trainer = Trainer(
        run_dir=folder, max_epochs=2, logger=False, log_every_n_steps=1, accelerator="cpu",
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, mode="min",
        virtual_ranks=V, gradient_clip_val=0.5, callbacks=[EMAWeightAveraging(decay=0.5), Reader()],
    )  # fmt: skip
    model = Hooked()
    if optimizer == "LBFGS":
        # It takes no other gradients, on one rank neither.
        model.picture.to(memory_format=torch.contiguous_format)
        # A batch is not moved again where it asks for the gradient again.
        model.draws = False
        model.configure = lambda module: torch.optim.LBFGS(module.parameters(), 0.1, max_iter=3)
    trainer.fit(model, batches(48, 12), [drawn(5), drawn(8)])
    if trainer.is_global_zero:
        Path(folder, "scores").write_text(repr(scores))


def drawn(size: int) -> DataLoader[Any]:
    return DataLoader([*range(16)], size, collate_fn=draw)


def draw(samples: list[int]) -> list[Tensor]:
    (tensor,) = noisy(samples)
    return [tensor + torch.rand_like(tensor)]


@pytest.mark.program
@pytest.mark.parametrize("optimizer", ["Adam", "LBFGS"])
def test_hooks_see_the_same_on_any_number_of_ranks(tmp_path: Path, optimizer: str):
    """L-BFGS decides by the loss how often it asks for the gradient: all ranks must agree."""
    for num in (1, 2, 3):
        done = on_ranks(train_hooked, f"{tmp_path}/{num}", optimizer, num=num)
        assert done.returncode == 0, done.stderr
    for num in (2, 3):
        check_same(tmp_path / f"{num}", tmp_path / "1")
        assert (tmp_path / f"{num}/scores").read_text() == (tmp_path / "1/scores").read_text()


class Sparse(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 1, sparse=True)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.table(batch[0].long()).sum()


def test_a_sparse_gradient_is_rejected_on_any_number_of_ranks(tmp_path: Path):
    with pytest.raises(ConfigError, match="a gradient is sparse"):
        fit(tmp_path, Sparse, lambda: batches(16, 8), virtual_ranks=V)


class Counting(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_samples", float(len(batch[0])), reduce_fx="sum")
        self.log("val_mean", batch[0].float().mean(), batch_size=len(batch[0]))


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_short_batch_of_a_validation_is_counted_once(tmp_path: Path, is_exact: bool):
    """It has fewer samples than slices."""
    trainer = Trainer(run_dir=tmp_path, virtual_ranks=V, accelerator="cpu", logger=False)
    loader = (
        batches(18, 16, shuffle=False)
        if is_exact
        else DataLoader([*range(18)], 16, collate_fn=noisy)
    )
    (found,) = trainer.validate(Counting(), loader, verbose=False)
    assert found == {"val_samples": 18.0, "val_mean": 8.5}
