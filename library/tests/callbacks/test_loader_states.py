"""Training data with a state of their own, as torchdata's and litdata's loaders have it."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from library.tests.kit import Net, Place, batches, check_exact, check_same, fit, on_ranks


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


class Restoring:
    """As litdata 0.2: it learns what a state says when it reads, and forgets it at its end.

    Asked for its state before, it writes the epoch of before into the one that it got.
    """

    def __init__(self) -> None:
        self.num, self.epoch, self.num_read = 12, 0, 0
        self.restore = False
        self.epoch_of_order = 1
        self.loaded: dict[str, int] | None = None

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.restore:
            self.loaded = None
            self.epoch, self.num_read = self.epoch + 1, 0
        loaded = self.loaded or {"epoch_of_order": self.epoch, "num_read": 0}
        self.epoch_of_order = loaded["epoch_of_order"]
        order = random.Random(self.epoch_of_order).sample(range(self.num), self.num)
        for number in order[loaded["num_read"] :]:
            self.num_read += 1
            yield torch.tensor([[float(number)]])
        self.restore = False

    def state_dict(self) -> dict[str, int]:
        state = {"epoch": self.epoch, "num_read": self.num_read}
        state |= {"epoch_of_order": self.epoch_of_order}
        if self.loaded is not None:
            self.loaded.update(state)
            return self.loaded
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.num_read, self.loaded = state["epoch"], state["num_read"], state
        if 0 < self.num_read < self.num:
            self.restore = True


class Rows:
    """A stream as one of `datasets` 5.2: every epoch begins where the last state says."""

    def __init__(self) -> None:
        self.num_read = 0
        self._starting_state_dict: dict[str, int] | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.num_read = (self._starting_state_dict or {"num_read": 0})["num_read"]
        while self.num_read < 12:
            self.num_read += 1
            yield torch.tensor([[float(self.num_read)]])

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._starting_state_dict = state


class Endless:
    """A loader as torchdata's, which hands on the state of its data set; it has no length."""

    persistent_workers = False

    def __init__(self) -> None:
        self.dataset = Rows()
        self.state: dict[str, int] = {}
        self.process: Rows | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.state:
            self.reader().load_state_dict(self.state)
            self.state = {}
        return iter(self.reader())

    def reader(self) -> Rows:
        """The data set, or its copy in a loader process."""
        if not self.persistent_workers:
            return self.dataset
        if self.process is None:
            self.process = copy.deepcopy(self.dataset)
        return self.process

    def state_dict(self) -> dict[str, int]:
        return self.reader().state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state, self.process = state, None


class WithProcesses(Endless):
    persistent_workers = True


STOPS: list[Place] = [(0, 3), (0, 11), (1, 0), (1, 5)]
KILLED = {"how": "SIGKILL", "save_every_s": 1e-9}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Stateful, {}),
        (Drawing, KILLED),
        (Restoring, {}),
        (Restoring, KILLED),
        (Endless, {}),
        (Endless, KILLED),
        (WithProcesses, {}),
    ],
    ids=str,
)
def test_a_loader_with_a_state_continues_exactly(tmp_path: Path, kind: type, options, capsys):
    check_exact(tmp_path, Net, kind, *STOPS, **options)
    said = capsys.readouterr().out
    assert "Note: " not in said
    # As after SIGKILL, which leaves the checkpoint of the last epoch's end.
    for epochs in (1, 2):
        fit(tmp_path / "longer", Net, kind, max_epochs=epochs)
    check_same(tmp_path / "longer", tmp_path / "whole")


def test_an_epoch_begins_anew_after_one_that_was_continued_and_limited(tmp_path: Path):
    # Nobody reads such an epoch to its end.
    check_exact(tmp_path, Net, Restoring, (0, 3), limit_train_batches=8, max_epochs=3)


def test_accumulated_batches_and_validations_within_an_epoch_are_kept(tmp_path: Path):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 4}
    check_exact(tmp_path, Net, Sized, *STOPS, **options)


def short() -> Any:
    return batches(8, seed=1)


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("max_size_cycle", (Sized, Drawing)), ("min_size", (Stateful, batches)),
        ("max_size_cycle", (batches, short)),
    ],
)  # fmt: skip
def test_several_loaders_continue_together(tmp_path: Path, mode: str, kinds, capsys):
    def make() -> CombinedLoader:
        return CombinedLoader({str(i): kind() for i, kind in enumerate(kinds)}, mode)

    check_exact(tmp_path, Net, make, (0, 0), (0, 1), (1, 0))
    assert "ordinary DataLoader" not in capsys.readouterr().out


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12.0)[:, None])


def test_a_stream_that_starts_over_beside_a_loader_with_a_state_is_noticed(tmp_path: Path, capsys):
    fit(tmp_path, Net, lambda: {"a": Sized(), "b": DataLoader(Stream())}, [(0, 1)], max_epochs=1)
    said = capsys.readouterr().out
    assert said.count("Note: batch 2 of epoch 0 is another one") == 1


def test_a_data_loader_beside_a_loader_with_a_state_continues(tmp_path: Path):
    def make() -> dict[str, Any]:
        return {"a": Sized(), "b": DataLoader(torch.arange(12.0)[:, None], shuffle=True)}

    check_exact(tmp_path, Net, make, (0, 0), (1, 5))


def one_cycle(module: Any) -> Any:
    """Asks for the number of steps, for which Lightning makes the loaders before the rest."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=module.trainer.estimated_stepping_batches
    )
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_loaders_that_the_schedule_asked_for_continue_too(tmp_path: Path):
    def make() -> dict[str, Any]:
        return {"a": Sized(), "b": batches(12, 1)}

    check_exact(tmp_path, lambda: Net(one_cycle), make, (0, 2), (1, 1))


class Shuffled(Sampler[int]):
    """Draws from a generator of its own, as torchdata's."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(16, generator=self.generator).tolist())


class AsksTwice(DataLoader[Any]):
    """As torchdata's: where it continues, its sampler draws an order that nobody reads, and one."""

    num_read = first = 0

    def __iter__(self) -> Any:
        if self.first:
            iter(self.batch_sampler)
        first, self.first, self.num_read = self.first, 0, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= first:
                self.num_read = number + 1
                yield batch
        self.num_read = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_read": self.num_read % len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["num_read"]


SAMPLES = torch.arange(16.0)[:, None]


def with_state() -> DataLoader[Any]:
    return AsksTwice(SAMPLES, batch_size=2, sampler=Shuffled())


def without_state() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler(torch.arange(1.0, 17.0), 16, generator=generator)
    return DataLoader(SAMPLES, batch_size=2, sampler=sampler)


def continue_on_ranks(folder: str) -> None:
    for kind in (with_state, without_state):
        check_exact(Path(folder, kind.__name__), Net, kind, (1, 1), max_epochs=3)


@pytest.mark.program
def test_a_sampler_with_a_generator_continues_on_two_ranks(tmp_path: Path):
    # Lightning distributes it by a sampler around it, which has no generator.
    done = on_ranks(continue_on_ranks, str(tmp_path))
    assert done.returncode == 0, done.stderr
