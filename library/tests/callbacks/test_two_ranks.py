"""Other people's data, models and faults on two ranks: all in one program, one after the other."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from library.tests.callbacks.test_keep_logs import FirstBatch
from library.tests.kit import Net, Normalized, batches, check_exact, fit, on_ranks
from samestep.callbacks.loss_guard import LossGuard
from samestep.ranks import environment, process_group

pytestmark = pytest.mark.program

DATA = TensorDataset(torch.arange(40.0)[:, None])


class Buckets:
    """A batch sampler that is no ``BatchSampler`` of torch, and draws while it gives batches."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(40))
        for _ in range(10):
            yield [left.pop(int(torch.randint(len(left), ()))) for _ in range(4)]


class StatefulLoader:
    """Each rank reads its share in an order of its own, which its state continues."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(environment.rank())
        self.left: list[int] = []

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.left = self.left or torch.randperm(5, generator=self.generator).tolist()
        while self.left:
            start = 8 * self.left.pop() + 4 * environment.rank()
            yield DATA[start : start + 4]

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])
        self.generator.set_state(state["generator"])


class Thaws(Net):
    """Trains its body from epoch 1 on, or until then."""

    freezes = False

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(self.freezes)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(not self.freezes)


class Freezes(Thaws):
    freezes = True


class Remembers(Net):
    """Each rank trains with what it remembers, of which rank zero alone saves a part."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.saved = 1.0, 1.0
        self.generator = torch.Generator().manual_seed(environment.rank())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.running = 0.9 * self.running + float(loss.detach())
        self.saved += self.running
        noise = torch.rand((), generator=self.generator)
        return loss * noise / (self.running + self.saved)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["saved"] = self.saved

    def on_load_checkpoint(self, checkpoint):
        self.saved = checkpoint["saved"]


class Queued(Net):
    """Each rank trains with a queue of its samples and their labels, as losses of metric learning.

    A list of all labels grows on each rank by another number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("labels", torch.zeros(3).long())
        self.register_buffer("listed", torch.zeros(0).long(), persistent=False)
        # As a library sets it by `requires_grad_()` of a loss that begins with this buffer.
        self.register_buffer("first", torch.zeros(1, requires_grad=True))

    def training_step(self, batch, batch_idx):
        samples = batch[0].flatten()
        self.queue = torch.cat([samples, self.queue])[:3]
        self.labels = torch.cat([samples.long(), self.labels])[:3]
        self.listed = torch.cat([self.listed, self.labels[: 1 + environment.rank()]])
        # A change in place: a validation in between must leave a tensor that training can change.
        self.listed += 1
        weight = 1 + (self.queue * self.labels).mean() + self.listed.float().mean()
        return self.first.sum() + super().training_step(batch, batch_idx) / weight


class NanOnOneRank(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_step, self.global_rank) == (5, 1) else loss


def batch_samplers(root: Path) -> dict[str, Any]:
    """The batches of each rank, by the kind of their sampler."""
    seen: dict[str, Any] = {}
    for kind in ("torch", "own"):

        def loader(kind: str = kind) -> DataLoader:
            torchs = BatchSampler(RandomSampler(DATA), 4, drop_last=False)
            return DataLoader(DATA, batch_sampler=torchs if kind == "torch" else Buckets())

        where = root / f"{kind}-{environment.world_size()}"
        (part,) = fit(where, Net, loader, max_epochs=1)
        seen[kind] = process_group.gather([values for _, _, values in part.seen])
    return seen


def have_same_weights(module: torch.nn.Module) -> bool:
    first, *others = process_group.gather({k: v.tolist() for k, v in module.state_dict().items()})
    return all(other == first for other in others)


def train_all(folder: str) -> None:
    """All that each rank does."""
    root = Path(folder)
    seen = batch_samplers(root)
    stateful: Any = (root / "stateful", Net, StatefulLoader, (0, 2), (1, 0))
    check_exact(*stateful, rank=1)
    check_exact(root / "norm", Normalized, batches, (0, 1), (1, 0), (1, 2), rank=1)
    check_exact(root / "logs", FirstBatch, batches, (0, 1), (1, 0), rank=1, max_epochs=3)
    check_exact(root / "remembers", Remembers, batches, (0, 1), (1, 0), rank=1)
    _, parts = check_exact(root / "queued", Queued, batches, (0, 1), (1, 0), rank=1)
    queued = parts[-1].module
    # A mean over the ranks would belong to no label.
    assert torch.equal(queued.queue.long(), queued.labels)
    assert have_same_weights(queued)
    assert len({*process_group.gather(tuple(queued.listed.tolist()))}) == 1
    # One rank gets the signal within an optimizer step: both take the whole step.
    accumulate = {"accumulate_grad_batches": 3, "rank": 1}
    check_exact(root / "accumulate", Net, lambda: batches(40), (0, 4), (1, 0), **accumulate)
    # DDP would wait for a gradient that does not come, or leave one out.
    for kind in (Thaws, Freezes):
        (part,) = fit(root / kind.__name__, kind)
        assert have_same_weights(part.module)
    (part,) = fit(root / "nan", NanOnOneRank, callbacks=lambda: [LossGuard(1)])
    (guard,) = (one for one in part.trainer.callbacks if isinstance(one, LossGuard))
    assert guard.num_skipped == 1
    assert all(torch.isfinite(weight).all() for weight in part.module.parameters())
    assert have_same_weights(part.module)
    if environment.rank() == 0:
        (root / "seen.json").write_text(json.dumps(seen))


def test_two_ranks(tmp_path: Path, capsys):
    done = on_ranks(train_all, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the loss on rank 1 is infinite or nan; skipped, 1 of 1" in done.stderr

    alone = batch_samplers(tmp_path)
    for kind, ranks in json.loads((tmp_path / "seen.json").read_text()).items():
        assert [len(batch) for rank in ranks for batch in rank] == [4] * 10
        whole = [batch for pair in zip(*ranks, strict=True) for batch in pair]
        assert sorted(chain(*whole)) == list(range(40))
        assert whole == alone[kind][0] or kind == "own"

    fit(tmp_path / "stateful/parts", Net, StatefulLoader, max_epochs=3)
    assert "of the training loaders of 2 ranks, and 1 ranks cannot" in capsys.readouterr().out
    fit(tmp_path / "remembers/parts", Remembers, max_epochs=3)
    said = capsys.readouterr().out
    assert "this run had 2 ranks, and continues on 1: with the same weights" in said
    assert "is that of rank zero" in said
