"""Models sharded by FSDP2, on CPU ranks: one run that moves from 1 to 2, 3 and 1 ranks, and others.

All that two ranks do is one program, and so is what three do.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from library.tests.kit import (
    Net,
    batches,
    check_exact,
    fit,
    make_spec,
    on_ranks,
    rows,
    weights,
)  # fmt: skip
from samestep import Trainer
from samestep.callbacks.loss_guard import LossGuard
from samestep.errors import ConfigError
from samestep.plugins import shards
from samestep.plugins.fsdp import blocks_of
from samestep.ranks import collectives, environment, strategies
from samestep.run import checkpoint, lifecycle, manifest
from samestep.run.checkpoint import (
    PREVIOUS,
    AtomicCheckpointIO,
    CheckpointError,
    load,
)  # fmt: skip
from samestep.run.manifest import read, verify

SHARDED: dict[str, Any] = {"strategy": "fsdp", "gradient_clip_val": 0.5, "monitor": "val_loss"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(5, 5)

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh()


class Deep(Net):
    """Blocks in a list, a tied weight, one that no layer holds; 5 rows on 2 or 3 ranks."""

    def __init__(self, configure: Any = None) -> None:
        super().__init__(configure)
        self.body, self.head = nn.Linear(1, 5), nn.Linear(5, 1)
        self.blocks = nn.ModuleList([Block(), Block(), nn.Sequential(nn.Linear(5, 5), Block())])
        self.blocks[2][0].weight = self.blocks[1].linear.weight
        self.scale = nn.Parameter(torch.ones(1))

    def configure_optimizers(self):
        # Asks for the length of the data, before anything else needs them.
        optimizer, num = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=num)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def loss(self, batch):
        x = batch[0]
        y = self.body(x)
        for block in self.blocks:
            y = block(y)
        return (self.head(y.tanh()) * self.scale - 0.1 * x).square().mean()


class Plain(Deep):
    """Without batch norm, whose statistics are those of a rank's slice."""

    def __init__(self, configure: Any = None) -> None:
        super().__init__(configure)
        for block in [*self.blocks[:2], self.blocks[2][1]]:
            block.norm = nn.Identity()

    configure_optimizers = Net.configure_optimizers


class Late(Net):
    """Makes its net late and without memory, and shards it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.head = self.net = None

    def configure_model(self):
        if self.net is None:
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch):
        return (self.net(batch[0]) - 0.1 * batch[0]).square().mean()


class Manual(Net):
    """Takes a step after every second batch. No block of its own holds the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Scalar(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class NanOnOneRank(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_step, self.global_rank) == (5, 1) else loss


def data() -> Any:
    return batches(24, 5)


def move(root: Path, max_epochs: int) -> Any:
    """Train the run that moves to so many epochs, and check that its state is in parts."""
    (part,) = fit(root / "moves", Plain, data, max_epochs=max_epochs, **SHARDED)
    num_ranks = environment.world_size()
    for parameter in part.module.parameters():
        assert isinstance(parameter, DTensor) == (num_ranks > 1)
        state = part.trainer.optimizers[0].state[parameter]["exp_avg"]
        if num_ranks > 1:
            assert len(state.to_local()) <= -(-len(parameter) // num_ranks)
    return part


def on_one_rank(folder: str, max_epochs: int) -> None:
    root = Path(folder)
    move(root, max_epochs)
    if max_epochs > 1:
        fit(root / "alone", Plain, data, max_epochs=max_epochs, **SHARDED)
    else:
        fit(root / "manual alone", Manual, data)


def on_two_ranks(folder: str) -> None:
    root = Path(folder)
    move(root, 3).trainer.test(dataloaders=batches(shuffle=False))
    check_exact(
        root / "deep", Deep, data, (0, 1), (1, "validation"), (1, 3), how="both", rank=1,
        save_every_s=1e-9, accumulate_grad_batches=2, precision="bf16-mixed", **SHARDED,
    )  # fmt: skip
    for kind in (Late, Manual):
        check_exact(root / kind.__name__, kind, data, (1, 1), strategy="fsdp")
    (part,) = fit(root / "nan", NanOnOneRank, data, callbacks=lambda: [LossGuard(1)], **SHARDED)
    (guard,) = (one for one in part.trainer.callbacks if isinstance(one, LossGuard))
    assert guard.num_skipped == 1
    assert all(torch.isfinite(w.full_tensor()).all() for w in part.module.parameters())
    wrong: list[tuple[Any, Any, str]] = [(Scalar, list, "scale is a number without dimensions")]
    if hasattr(of_lightning, "EMAWeightAveraging"):  # since Lightning 2.6
        averages = [of_lightning.EMAWeightAveraging()]
        wrong.append((Plain, lambda: averages, "EMAWeightAveraging is not supported"))
    for model, callbacks, message in wrong:
        with pytest.raises(ConfigError, match=message):
            fit(root / "wrong", model, data, callbacks=callbacks, **SHARDED)
    with (
        mock.patch.object(collectives, "averages_on_cpu", adds_up),
        pytest.raises(ConfigError, match=r"does not average the gradients on CPUs; use .*ddp"),
    ):
        fit(root / "wrong", Plain, data, **SHARDED)


def adds_up() -> bool:
    """What gloo of torch 2.8 says, after the ranks have met as they do there."""
    dist.barrier()
    return False


def on_three_ranks(folder: str) -> None:
    move(Path(folder), 4)


averages = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="older versions do not average gradients on CPUs, and are rejected",
)


@pytest.mark.program
@averages
def test_sharded_runs(tmp_path: Path):
    """A run moves from 1 rank to 2, loses its last save, and goes on with 3, and then with 1."""
    folder = tmp_path / "moves/checkpoints"
    for function, num, *numbers in ((on_one_rank, 0, 1), (on_two_ranks, 2)):
        done = on_ranks(function, str(tmp_path), *numbers, num=num)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "the loss on rank 1 is infinite or nan; skipped, 1 of 1" in done.stderr

    manual, alone = (weights(tmp_path / name) for name in ("Manual/whole", "manual alone"))
    torch.testing.assert_close(manual, alone, rtol=1e-4, atol=1e-6)

    # Of all folders those are left that a checkpoint names, and no rank has all of the weights.
    manifests = [read(path) for path in folder.glob("*.ckpt")]
    assert {path.name for path in folder.glob("shards-*")} == {own.shards for own in manifests}
    last, previous = read(folder / "last.ckpt"), read(folder / PREVIOUS)
    assert last.shards != previous.shards
    sizes = [(folder / name).stat().st_size for name in last.files()]
    assert len(sizes) == 2
    # One process reads it whole, and validates as two ranks have.
    model = Plain().eval()
    best = load(folder / "best.ckpt")
    model.load_state_dict(best["state_dict"])
    loss = model.loss([torch.arange(16.0)[:, None]]).item()
    assert loss == pytest.approx(best["checkpoints"]["best_score"], rel=1e-5)
    assert f"{loss:.4f}" in done.stdout  # the table of the test

    first, second = (folder / name for name in last.files())
    for damage, said in (
        (lambda: second.write_bytes(first.read_bytes()), "1.shard is of another checkpoint"),
        (second.unlink, "1.shard: it cannot be read: No such file"),
    ):
        kept = [path.read_bytes() for path in (first, second)]
        damage()
        assert said in verify(folder / "last.ckpt")
        for path, content in zip((first, second), kept, strict=True):
            path.write_bytes(content)
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 1
    second.write_bytes(content)

    done = on_ranks(on_three_ranks, str(tmp_path), num=3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{folder / 'last.ckpt'}: its shard {last.files()[1]}: it is damaged" in done.stderr
    assert f"Using last-previous.ckpt, of step {previous.global_step}" in done.stderr
    done = on_ranks(on_one_rank, str(tmp_path), 5, num=0)
    assert done.returncode == 0, done.stdout + done.stderr
    moved, alone = rows(tmp_path / "moves"), rows(tmp_path / "alone")
    for ours, theirs in zip(moved, alone, strict=True):
        # Of the whole batch, although 5 samples make unequal slices on 2 and 3 ranks.
        for name in ("step/gradient_norm", "val_loss"):
            if theirs[name] or ours[name]:
                assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-4), name


@pytest.mark.parametrize("moment", ["before its shards are verified", "before they are read"])
def test_a_reader_takes_the_new_checkpoint_if_the_run_removes_the_shards_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    path = tmp_path / "mine/checkpoints/last.ckpt"

    def save(step: int) -> None:
        tensors = {"w": torch.empty(2, device="meta")}
        content = {"global_step": step, "state_dict": tensors, "sharded": {"/state_dict/w": 0}}
        part = {"/state_dict/w": torch.full([2], float(step))}
        shards.save(AtomicCheckpointIO(), content, part, path)
        manifest.prune(path.parent)

    def then_saves(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            monkeypatch.undo()
            # The next one keeps the shards of the one before.
            save(2)
            save(3)
            return found

        return call

    save(1)
    module, name = (checkpoint, "verify") if "read" in moment else (manifest, "_verify_bytes")
    monkeypatch.setattr(module, name, then_saves(getattr(module, name)))
    found = load(path)
    assert (found["global_step"], found["state_dict"]["w"].tolist()) == (3, [3.0, 3.0])
    # Without a new checkpoint, shards that are missing are an error.
    for shard in path.parent.glob("shards-3-*/*"):
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"0\.shard: it cannot be read: No such file"):
        load(path)


def test_blocks_are_the_items_of_lists_and_hold_no_tied_weight():
    model = Deep()
    assert blocks_of(model) == [model.blocks[0], model.blocks[2][1]]


def test_what_cannot_be_sharded_is_rejected(tmp_path: Path, monkeypatch):
    spec = make_spec(tmp_path, strategy="fsdp")
    assert strategies.topology(spec)["strategy"] == "auto", "one process shares with nobody"
    with pytest.raises(ConfigError, match="sync_batchnorm=True: is not supported"):
        strategies.topology(replace(spec, sync_batchnorm=True))
    monkeypatch.setattr(lifecycle, "is_shared", lambda run_dir: False)
    with pytest.raises(ConfigError, match="is not shared between the nodes"):
        lifecycle.begin(spec, [])


@pytest.mark.parametrize("strategy", [ModelParallelStrategy, FSDPStrategy])
def test_other_ways_to_shard_are_rejected(tmp_path: Path, strategy: Any):
    with pytest.raises(ConfigError, match="strategy"):
        Trainer(run_dir=tmp_path, strategy=strategy())
