"""DataLoaders of torch: an interrupted epoch resumes with the next batch, bit by bit."""

import copy
import pickle
import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from library.tests.kit import Net, Place, batches, check_exact, fit, on_ranks
from samestep.data.loader import BatchLoader
from samestep.data.sampler import SplitBatches, WrappedBatches
from samestep.data.torch_loaders import ResumableBatches, SeededIndices
from samestep.errors import ConfigError, RunError
from samestep.plugins import data_of_ranks
from samestep.plugins.data_of_ranks import draws_in_collation

PLACES: list[Place] = [(0, 1), (1, 0), (1, 2)]
DISTURBED: dict[str, Any] = {"how": "both", "save_every_s": 1e-9}
"""By SIGTERM and SIGKILL in turns; it saves at each step."""


class Noisy(Dataset[torch.Tensor]):
    """A transform that draws from all three libraries."""

    reads: list[int] = []  # noqa: RUF012

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append(index)
        noise = torch.rand(1) + float(np.random.rand()) + random.random()
        return index + 0.01 * noise


class AllAtOnce(Noisy):
    """As Hugging Face's data sets: asked for a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Buckets(Sampler[list[int]]):
    """Samples the next batch when it is asked for it."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield random.sample(range(16), 4)


class Endless(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from Buckets()


class Stream(IterableDataset[torch.Tensor]):
    """Shuffles in a buffer."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        rest = list(range(info.id if info else 0, 16, info.num_workers if info else 1))
        while rest:
            index = rest.pop(random.randrange(len(rest)))
            yield index + 0.01 * torch.rand(1)


class Sized(Stream):
    def __len__(self) -> int:
        return 16


class OneByOne:
    """A loader of another library."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        for ids in torch.randperm(16).view(4, 4):
            yield ids[:, None] + 0.01 * torch.rand(4, 1)


class Predicts(Net):
    def predict_step(self, batch, batch_idx):
        return batch


def with_generator(num: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Noisy(), 4, sampler=RandomSampler(range(num), generator=generator))


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        AllAtOnce(), 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "generator": with_generator,
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=Buckets()),
    "a sampler of batches": lambda: DataLoader(AllAtOnce(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream, workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "stream with a length": lambda: DataLoader(Sized(), 4, drop_last=True),
    "another loader": OneByOne,
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("name", LOADERS)
def test_an_interrupted_epoch_continues_exactly(tmp_path: Path, name: str, capsys):
    check_exact(tmp_path, Net, LOADERS[name], *PLACES, **DISTURBED)
    said = capsys.readouterr().out
    assert "ordinary DataLoader" not in said
    reads = name.startswith(("stream", "another", "a sampler"))
    assert ("reads 2 batches again" in said) == reads


def test_batches_before_are_not_read(tmp_path: Path):
    Noisy.reads.clear()
    fit(tmp_path, Net, LOADERS["shuffled"], [(0, 2)], max_epochs=1)
    # The one that was next when the signal came is read again.
    assert len(Noisy.reads) == 20


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        # Processes of a loader take most of the time, so one of these has some.
        ("max_size_cycle", "workers", lambda: with_generator(8)),
        ("max_size", "shuffled", lambda: with_generator(8)),
        ("max_size_cycle", "shuffled", LOADERS["stream"]),
        ("min_size", "shuffled", LOADERS["stream"]),
        ("max_size_cycle", "shuffled", batches),
    ],
)
def test_several_loaders_continue_together(tmp_path: Path, mode: str, first: str, second: Any):
    """The shorter one has begun again within the epoch."""

    def make() -> CombinedLoader:
        return CombinedLoader({"a": LOADERS[first](), "b": second()}, mode)

    check_exact(tmp_path, Net, make, (0, 0), (1, 2), **DISTURBED)


def test_a_loader_is_as_it_was_after_training(tmp_path: Path):
    """In a notebook, which stops and continues with the same object, and predicts with it."""
    loader = DataLoader(Noisy(), 4)
    batch_sampler = loader.batch_sampler
    parts = fit(tmp_path, Predicts, lambda: loader, [(0, 1)])
    assert loader.batch_sampler is batch_sampler
    assert len(parts[-1].trainer.predict(parts[-1].module, loader)) == 4


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("kind", [DataLoader, BatchLoader])
def test_a_batch_larger_than_the_data_is_rejected(tmp_path: Path, kind: Any):
    """Lightning would finish such a run without a step."""
    data = TensorDataset(torch.arange(16.0)[:, None])
    with pytest.raises(ConfigError, match=r"no batch in 16 samples; .* use a smaller batch"):
        fit(tmp_path, data=lambda: kind(data, batch_size=17, drop_last=True))
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize("options", [{}, {"split_batches": True}])
def test_a_batch_sampler_without_an_end_continues(tmp_path: Path, options: dict[str, bool]):
    data = lambda: DataLoader(Noisy(), batch_sampler=Endless())  # noqa: E731
    check_exact(tmp_path, Net, data, (0, 1), (1, 1), limit_train_batches=3, **options)


@pytest.mark.parametrize("options", [{}, {"split_batches": True}])
def test_a_batch_sampler_without_an_end_continues_beside_a_shorter_loader(
    tmp_path: Path, options: dict[str, bool]
):
    def make() -> CombinedLoader:
        loaders = {"a": DataLoader(Noisy(), batch_sampler=Endless()), "b": LOADERS["shuffled"]()}
        return CombinedLoader(loaders, "max_size_cycle")

    check_exact(tmp_path, Net, make, (0, 1), (1, 1), limit_train_batches=3, **options)


def test_a_stream_that_has_become_shorter_is_an_error(tmp_path: Path):
    class Shorter(Stream):
        num = 16

        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.ones(self.num, 1)

    def make() -> DataLoader[Any]:
        Shorter.num -= 12
        return DataLoader(Shorter(), 1)

    Shorter.num = 28
    with pytest.raises(
        RunError, match=r"end after 4 batches of this epoch, .* interrupted after 6"
    ):
        fit(tmp_path, Net, make, [(0, 5)])


def check_on_ranks(folder: str) -> None:
    """One program for all kinds: its start takes longer than its runs."""
    for name in ("shuffled", "workers", "batch sampler"):
        whole, _ = check_exact(Path(folder, name), Net, LOADERS[name], (0, 0), (1, 0), rank=1)
        ids = [i for _, _, seen in whole.seen for i in seen]
        assert len(set(ids)) == len(ids), name  # each rank draws other numbers in each epoch


@pytest.mark.program
def test_two_ranks_continue_exactly(tmp_path: Path):
    done = on_ranks(check_on_ranks, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    # Each kind has four starts: one of the whole run, three of the run that is stopped twice.
    assert done.stdout.count("batch_size counts samples per rank") == 3 * 4


def stop_on_ranks(folder: str) -> None:
    loaders = iter([LOADERS["shuffled"]()])
    with suppress(StopIteration):  # it does not continue here
        fit(Path(folder), Net, lambda: next(loaders), [(0, 0)], max_epochs=1)


@pytest.mark.program
def test_another_number_of_ranks_is_told(tmp_path: Path, capsys):
    stopped = on_ranks(stop_on_ranks, str(tmp_path))
    assert "Stopped by SIGTERM" in stopped.stdout, stopped.stderr
    fit(tmp_path, Net, LOADERS["shuffled"], max_epochs=1)
    assert "this epoch began on 2 ranks, and continues on 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["shuffled", "stream", "stream with a length", "another loader"])
def test_a_split_is_advised_where_it_is_possible(name: str):
    # Its length says nothing: limit_train_batches gives a stream one too.
    notes = "\n".join(data_of_ranks.notes_on([LOADERS[name]()]))
    can_be_split = name == "shuffled"
    assert ("split_batches=True splits each batch" in notes) == can_be_split
    assert ("no batch can be split" in notes) != can_be_split


def test_ids_go_to_another_process_without_seeding_this_one():
    before = random.getstate()
    ids = pickle.loads(pickle.dumps(SeededIndices([3, 1], 5)))
    assert random.getstate() == before
    assert [*ids] == [3, 1]
    assert random.getstate() != before


class Named:
    """A batch sampler with attributes that have names of ours."""

    def __init__(self) -> None:
        self.seed, self.epoch, self.rank, self.size = 7, 8, 9, 4

    def __len__(self) -> int:
        return 16 // self.size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, 16, self.size):
            yield [*range(start, start + self.size)]


def test_attributes_of_a_batch_sampler_are_read_and_set_there():
    batches = Named()
    for plan in (ResumableBatches(batches, 0), SplitBatches(batches, 0, 2)):
        stand_in: Any = WrappedBatches(batches, plan)
        assert (stand_in.seed, stand_in.epoch, stand_in.rank) == (7, 8, 9)
        stand_in.size = 8
        assert (batches.size, len(stand_in)) == (8, 2)
        vars(stand_in)["size"] = 4
        assert batches.size == 4
        assert type(copy.deepcopy(stand_in)) is Named


class Grows(Net):
    """Its batches are twice as large in the second epoch."""

    def on_train_epoch_start(self):
        batches = self.trainer.train_dataloader.batch_sampler
        batches.batch_size = 4 * (self.current_epoch + 1)


@pytest.mark.parametrize("options", [{}, {"split_batches": True}])
def test_a_batch_size_that_is_set_while_training_counts(tmp_path: Path, options: Any):
    (part,) = fit(tmp_path, Grows, LOADERS["shuffled"], **options)
    assert [len(seen) for _, _, seen in part.seen] == [4, 4, 4, 4, 8, 8]


class Late(Dataset[torch.Tensor]):
    """The first batch of the first process comes after the first one of the second process."""

    def __init__(self) -> None:
        self.second_has_begun_again = torch.multiprocessing.Event()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 12:
            self.second_has_begun_again.set()
        if index == 0:
            self.second_has_begun_again.wait()
        return torch.tensor([float(index)])


def test_batches_come_in_the_order_of_the_sampler(tmp_path: Path, capsys):
    """With ``in_order=False`` the first ones would not be those that were trained on."""
    loader = DataLoader(Late(), 4, num_workers=2, in_order=False)
    (part,) = fit(tmp_path, Net, lambda: loader, max_epochs=1)
    assert [ids[0] for _, _, ids in part.seen] == [0, 4, 8, 12]
    assert not loader.in_order
    assert "Note: the batches come in order, in spite of in_order=False" in capsys.readouterr().out


class Consumed(Sampler[int]):
    """Skips the samples that were trained on before, in its first pass."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(16).tolist()[self.num :]
        self.num = 0


class SkipsItself(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        num = 4 * self.trainer.global_step % 16
        return DataLoader(Noisy(), 4, sampler=Consumed(num))

    def val_dataloader(self) -> Any:
        return batches(shuffle=False)


@pytest.mark.parametrize("options", [{}, {"split_batches": True}])
def test_batches_that_the_sampler_has_skipped_are_not_skipped_again(tmp_path: Path, options: Any):
    check_exact(tmp_path, Net, SkipsItself, *PLACES, **DISTURBED, max_epochs=3, **options)


def test_a_batch_that_is_like_the_first_one_is_not_taken_for_it(tmp_path: Path):
    data = lambda: DataLoader(Noisy(), batch_sampler=[[0], [1], [0], [2]])  # noqa: E731
    check_exact(tmp_path, Net, data, (0, 1))


class ReadsTwo(Net):
    """Reads its batches itself, two or what is left of them."""

    def training_step(self, dataloader_iter):
        read = [*islice(dataloader_iter, 2)]
        self.numbers = [number for _, number, _ in read]
        loss = torch.stack([self.loss(batch) for batch, _, _ in read]).mean()
        self.log("train_loss", loss, batch_size=4)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        first = self.trainer.global_step * 2 % 6 or 6
        assert self.numbers == [first - 2, first - 1]


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_step_that_reads_several_batches_continues_exactly(tmp_path: Path):
    data = lambda: DataLoader(Noisy(), 3, shuffle=True)  # noqa: E731
    whole, _ = check_exact(tmp_path, ReadsTwo, data, (0, 1), (1, 3), **DISTURBED)
    assert whole.trainer.global_step == 6


def mix(samples):
    return torch.stack(samples) * np.random.beta(1, 1)


def test_a_collation_that_draws_is_found():
    data = torch.arange(8.0)
    kinds = {
        True: [DataLoader(data, 4, collate_fn=mix), BatchLoader(data, 4, collate_fn=mix)],
        False: [
            DataLoader(data, 4),
            DataLoader(data, 4, collate_fn=torch.stack),
            # The data set draws, for each sample.
            DataLoader(Noisy(), 4, collate_fn=lambda samples: torch.stack(samples)),
            DataLoader(data[:1], 1, collate_fn=mix),
            BatchLoader(data, 4),
        ],
    }
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for draws, loaders in kinds.items():
        for loader in loaders:
            assert draws_in_collation(loader) is draws
    torch.testing.assert_close(torch.get_rng_state(), before)
