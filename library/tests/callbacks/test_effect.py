"""What data sets, transforms and loaders keep shows in the batch that comes next."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from library.tests.kit import Killed, Net, fit
from samestep.run import record

SAYS = "is another one than it was before", "is repeated with other samples"


class Samples(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])


class Jitters(Samples):
    """A transform with numbers of its own."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.dice.random()


class Counts(Samples):
    """Harmless: it only counts."""

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index)


class Caches(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.cache.setdefault(index, super().__getitem__(index))


class Epochs(Samples):
    """Counts its passes, and samples depend on it."""

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return super().__getitem__(index) + self.count // 16


class Passes(IterableDataset[Any]):
    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(torch.full((16, 1), float(self.passes)))


def collate_with(dice: random.Random) -> Any:
    return lambda samples: torch.stack(samples) + dice.random()


CASES: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (
        lambda: Jitters(dice=random.Random(0)),
        {},
        "training data 0.dataset.dice is in no checkpoint",
    ),
    (lambda: Jitters(dice=random.Random(0)), {"num_workers": 1}, "what the data set, a transform"),
    (lambda: Counts(count=0), {}, ""),
    (lambda: Caches(cache={}), {}, ""),
    (lambda: Epochs(count=0), {}, "dataset.count"),
    (lambda: Passes(), {}, "dataset.passes"),
    (lambda: Samples(), {"shuffle": True}, ""),
    (lambda: Samples(), {"shuffle": True, "num_workers": 1}, ""),
    (lambda: Samples(), {"collate_fn": collate_with(random.Random(0))}, "collate_fn.dice"),
]


@pytest.mark.parametrize(("make", "options", "name"), CASES)
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_batch_that_differs_is_said_and_no_other(
    tmp_path: Path, make, options, name: str, how: str, capsys
):
    if options.get("num_workers"):
        options = {"persistent_workers": True, **options}
    fit(
        tmp_path, Net, lambda: DataLoader(make(), batch_size=4, **options), [(1, 1)], how=how,
        save_every_s=1e-9,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert sum(map(said.count, SAYS)) == bool(name), said
    assert name in said
    notes = [repeat["note"] for repeat in record.read(tmp_path).repeats]
    assert any(note and note in said for note in notes) == bool(name)


NUM_READ = [0]


class Drifts(Samples):
    """Is another one whenever it is read; what a module has is in no checkpoint."""

    def __getitem__(self, index: int) -> Any:
        NUM_READ[0] += 1
        return super().__getitem__(index) + NUM_READ[0]


class TwoParts(L.LightningDataModule):
    validation = Samples

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=4)

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation(), batch_size=4)


class DriftingParts(TwoParts):
    validation = Drifts


class KilledInValidation(L.Callback):
    def __init__(self, left: list[int]) -> None:
        self.left = left

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and self.left:
            self.left.pop()
            raise Killed


@pytest.mark.parametrize("interval", [2, 4])
@pytest.mark.parametrize(("make", "num_said"), [(TwoParts, 0), (DriftingParts, 1)])
def test_a_validation_that_is_repeated_with_other_samples_is_said(
    tmp_path: Path, make, num_said: int, interval: int, capsys
):
    """After the epoch's end, or within the epoch; the first epoch's is saved and not repeated."""
    left = [1]
    fit(
        tmp_path, Net, make, how="SIGKILL", val_check_interval=interval, save_every_s=1e-9,
        callbacks=lambda: [KilledInValidation(left)],
    )  # fmt: skip
    said = capsys.readouterr().out
    note = f"the validation after {interval} batches of epoch 1 is repeated with other samples"
    assert said.count("Note: ") == said.count(note) == num_said
    found = {repeat["note"] for repeat in record.read(tmp_path).repeats}
    assert len([each for each in found if each.startswith(note)]) == num_said
