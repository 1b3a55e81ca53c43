"""What hooks outside of the steps draw: the same in each start, on any number of ranks."""

import json
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

from library.tests.kit import Net, batches, check_exact, fit, on_ranks
from samestep.callbacks.rng import DATA_HOOKS, isolated_generators
from samestep.ranks import devices, process_group

Drawn = dict[str, list[float]]

drawn: Drawn = {}
"""What each hook of this process has drawn, by owner, hook and epoch."""


def draw(owner: str, hook: str, epoch: int = 0) -> None:
    numbers = [torch.rand(()).item(), float(np.random.rand()), random.random()]
    name = f"{owner}.{hook} {epoch}"
    # Some hooks are called several times, such as `setup`.
    assert drawn.setdefault(name, numbers) == numbers, name


class DrawsInData(L.LightningDataModule):
    """Splits the samples again wherever it can, without a generator."""

    def prepare_data(self):
        draw("data", "prepare_data")

    def setup(self, stage):
        draw("data", "setup")
        random_split(range(9), [6, 3])

    def train_dataloader(self):
        draw("data", "train_dataloader")
        self.train, _ = random_split(TensorDataset(torch.arange(20.0)[:, None]), [16, 4])
        return DataLoader(self.train, 4, shuffle=True)

    def val_dataloader(self):
        draw("data", "val_dataloader")
        _, self.val = random_split(TensorDataset(torch.arange(20.0)[:, None]), [16, 4])
        return DataLoader(self.val, 4)

    def test_dataloader(self):
        draw("data", "test_dataloader")
        return DataLoader(self.val, 4)


class DrawsInModule(Net):
    def prepare_data(self):
        draw("module", "prepare_data")

    def setup(self, stage):
        draw("module", "setup")

    def configure_callbacks(self):
        draw("module", "configure_callbacks")
        return []

    def configure_model(self):
        draw("module", "configure_model")

    def configure_optimizers(self):
        draw("module", "configure_optimizers")
        # It asks for the training data here.
        assert self.trainer.estimated_stepping_batches == 8
        return super().configure_optimizers()

    def on_fit_start(self):
        draw("module", "on_fit_start")

    def on_train_start(self):
        draw("module", "on_train_start")

    def on_train_epoch_start(self):
        draw("module", "on_train_epoch_start", self.current_epoch)

    def on_train_epoch_end(self):
        draw("module", "on_train_epoch_end", self.current_epoch)


class DrawsInCallback(L.Callback):
    """Draws more numbers on rank zero, as a callback that shows samples there does."""

    def draw(self, trainer: L.Trainer, hook: str, epoch: int = 0) -> None:
        draw("callback", hook, epoch)
        if trainer.is_global_zero:
            torch.rand(3)

    def setup(self, trainer, pl_module, stage):
        self.draw(trainer, "setup")

    def on_fit_start(self, trainer, pl_module):
        self.draw(trainer, "on_fit_start")

    def on_train_start(self, trainer, pl_module):
        self.draw(trainer, "on_train_start")

    def on_train_epoch_start(self, trainer, pl_module):
        self.draw(trainer, "on_train_epoch_start", trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.draw(trainer, "on_train_epoch_end", trainer.current_epoch)


def train(run_dir: Path, *places: Any, **options: Any) -> tuple[Drawn, list[Any]]:
    """What was drawn in all processes of a run, and the batches that it trained on."""
    drawn.clear()
    more = {"callbacks": lambda: [DrawsInCallback()], "split_batches": True, **options}
    parts = fit(run_dir, DrawsInModule, DrawsInData, places, **more)
    last = parts[-1]
    last.trainer.test(last.module, datamodule=last.trainer.datamodule, verbose=False)
    train, val = last.trainer.datamodule.train, last.trainer.datamodule.val
    assert sorted([*train.indices, *val.indices]) == [*range(20)]
    return dict(drawn), [batch for part in parts for batch in part.seen]


def train_on_ranks(root: str, run_dir: str) -> None:
    found, seen = train(Path(run_dir), max_epochs=2)
    of_ranks = process_group.gather((found, seen))
    if process_group.environment.rank() == 0:
        Path(root, "of_ranks.json").write_text(json.dumps(of_ranks))


@pytest.mark.program
def test_hooks_draw_the_same_numbers_in_each_start_on_any_number_of_ranks(tmp_path: Path):
    whole, batches = train(tmp_path / "whole", num_sanity_val_steps=2)
    hooks = {name.split()[0].split(".")[1] for name in whole}
    assert hooks >= {*DATA_HOOKS} - {"predict_dataloader"}
    # Splits that are repeated are the same, and nothing else is.
    of_data = {tuple(n) for name, n in whole.items() if name.split()[0].split(".")[1] in DATA_HOOKS}
    assert len(of_data) == 1
    assert len({tuple(numbers) for numbers in whole.values()}) == 1 + 4 + 2 * 2 + 1
    places = (0, 1), (1, "start")
    parts, batches_of_parts = train(tmp_path / "parts", *places, num_sanity_val_steps=2)
    assert parts == whole
    assert batches_of_parts == batches

    done = on_ranks(train_on_ranks, str(tmp_path), str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    rank_zero, rank_one = json.loads((tmp_path / "of_ranks.json").read_text())
    assert rank_zero[0] == whole
    # Only one process of a node prepares data.
    expected = {name: n for name, n in whole.items() if "prepare_data" not in name}
    assert rank_one[0] == expected
    for (_, _, samples), (_, _, first), (_, _, second) in zip(
        batches, rank_zero[1], rank_one[1], strict=True
    ):
        assert samples == first + second


class DrawsOnGPU(Net):
    """Draws in steps and validations from what stands for the generator of an Apple GPU."""

    gpu = torch.Generator()

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * torch.rand((), generator=self.gpu)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.rand((), generator=self.gpu))


def test_an_apple_gpu_draws_the_same_numbers_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu = DrawsOnGPU.gpu
    monkeypatch.setattr(devices, "has_mps", lambda: True)
    monkeypatch.setattr(torch.mps, "manual_seed", gpu.manual_seed)
    monkeypatch.setattr(torch.mps, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", gpu.set_state)
    check_exact(tmp_path, DrawsOnGPU, batches, (0, 1), (0, "validation"), (1, 2))
    # A validation leaves it as it was.
    gpu.manual_seed(1)
    before = gpu.get_state()
    with isolated_generators():
        torch.rand((), generator=gpu)
    assert torch.equal(gpu.get_state(), before)
