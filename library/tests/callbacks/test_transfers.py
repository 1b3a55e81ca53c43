"""What a DataModule or a module does where a batch is moved to the device."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

from library.tests.callbacks.test_loader_states import Sized
from library.tests.kit import Net, Normalized, Place, batches, check_exact, check_same, fit

# Lightning has moved the next batch before the ranks agree to stop.
STOPS: list[Place] = [(0, 1), (0, 3), (1, 2)]


class Counts(L.LightningDataModule):
    """Counts the batches of the training in each hook of the transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0

    def train_dataloader(self) -> Any:
        # Unlike a BatchLoader it has given the next batch when the ranks agree to stop.
        return Sized()

    def val_dataloader(self) -> Any:
        return torch.ones(1, 1, 1)

    def count(self, batch: Any) -> Any:
        if not self.trainer.training:
            return batch
        self.level += 1
        return batch + self.level

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.count(batch)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return self.count(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.count(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


def test_a_batch_that_is_not_trained_on_is_not_counted(tmp_path: Path):
    check_exact(tmp_path, Net, Counts, *STOPS)


class Augments(Net):
    """As with Kornia: random transforms on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x = batch[0]
        return x + torch.randn(x.shape) if self.trainer.training else x


class Draws(Normalized):
    """Draws in the transfer, in the step, and when it is saved."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand(1)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.rand(1), np.random.rand(), random.random()


def test_what_a_save_draws_changes_no_step(tmp_path: Path):
    fit(tmp_path / "often", Draws, save_every_s=1e-9)
    fit(tmp_path / "rarely", Draws)
    check_same(tmp_path / "often", tmp_path / "rarely")


def test_random_transforms_on_the_device_do_not_depend_on_interruptions(tmp_path: Path):
    # A BatchLoader seeds nothing here; what reads an ordinary loader is seeded for each batch.
    check_exact(tmp_path, Augments, batches, *STOPS)
