"""Training data with a state of their own, as torchdata's and litdata's loaders have it."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from samestep.data.loader import BatchLoader
from tests.samestep.callbacks.interrupted import Learner, check_exact, fit

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")


class Stateful:
    """Draws an order of its own for each epoch, and goes on in the middle of one.

    In the style of litdata: the state counts epochs and samples, and that of a whole epoch is one
    whose iterator gives nothing more.
    """

    def __init__(self, num: int = 12) -> None:
        self.num = num
        self.epoch = 0
        self.index = 0
        self.is_restored = False
        self.state: dict[str, Any] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.is_restored:
            self.epoch, self.index = self.epoch + 1, 0
        self.is_restored = False
        order = random.Random(self.epoch).sample(range(self.num), self.num)
        while self.index < self.num:
            self.index += 1
            yield torch.tensor([[float(order[self.index - 1])]])

    def state_dict(self) -> dict[str, Any]:
        # The same object each time, as some loaders have it.
        self.state.update(epoch=self.epoch, index=self.index)
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.index, self.is_restored = state["epoch"], state["index"], True


class Sized(Stateful):
    def __len__(self) -> int:
        return self.num


class Drawing(Sized):
    """Never begins an order again: an endless stream of random numbers, cut into epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num):
            yield torch.randn(1, 1, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


STOPS = [(0, 3), (0, 11), (1, 0), (1, 5)]


@pytest.mark.parametrize("kind", [Stateful, Sized, Drawing])
@pytest.mark.parametrize("every_s", [300, 1e-9])
def test_a_loader_with_a_state_continues_exactly(tmp_path: Path, kind: type, every_s, capsys):
    check_exact(tmp_path, kind, *STOPS, every_s=every_s)
    said = capsys.readouterr().out
    assert "a loader with a state of its own" in said
    assert "ordinary DataLoader" not in said


def test_accumulated_batches_and_validations_within_an_epoch_are_kept(tmp_path: Path):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 4}
    check_exact(tmp_path, Sized, *STOPS, **options)


@pytest.mark.parametrize("make", [Stateful, Sized, Drawing])
def test_a_loader_continues_after_a_whole_epoch(tmp_path: Path, make: type):
    """As after SIGKILL, which leaves the checkpoint of the last epoch's end."""
    (whole,) = fit(tmp_path / "whole", make)
    parts = [fit(tmp_path / "parts", make, max_epochs=epochs)[0] for epochs in (1, 2)]
    assert [batch for part in parts for batch in part.seen] == whole.seen


def mixed(mode: str, *kinds: Any) -> Any:
    def make() -> CombinedLoader:
        return CombinedLoader({str(i): kind() for i, kind in enumerate(kinds)}, mode)

    return make


def batches() -> BatchLoader:
    return BatchLoader(TensorDataset(torch.arange(16.0)[:, None]), 2, shuffle=True)


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
@pytest.mark.parametrize("kinds", [(Sized, Drawing), (Sized, batches), (Stateful, batches)])
def test_several_loaders_continue_together(tmp_path: Path, mode: str, kinds, capsys):
    check_exact(tmp_path, mixed(mode, *kinds), (0, 3), (0, 6), (1, 2))
    assert "ordinary DataLoader" not in capsys.readouterr().out


def test_each_note_says_what_is_true_of_its_loader(tmp_path: Path, capsys):
    def make() -> dict[str, Any]:
        return {"a": Sized(), "b": DataLoader(torch.ones(12, 1))}

    fit(tmp_path, make, max_epochs=1)
    said = capsys.readouterr().out
    assert said.count("ordinary DataLoader") == said.count("a state of its own") == 1


class Scheduled(Learner):
    """Asks for the number of steps, for which Lightning makes the loaders before the rest."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("kind", [Sized, batches])
def test_loaders_that_the_schedule_asked_for_continue_too(tmp_path: Path, kind: Any):
    check_exact(tmp_path, kind, (0, 3), (1, 2), model=Scheduled)
