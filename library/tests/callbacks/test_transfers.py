"""What a DataModule or a module does where a batch is moved to the device."""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from library.tests.callbacks.test_loader_states import Sized
from library.tests.kit import Net, Place, batches, check_exact

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


def test_random_transforms_on_the_device_do_not_depend_on_interruptions(tmp_path: Path):
    # A BatchLoader seeds nothing here; what reads an ordinary loader is seeded for each batch.
    check_exact(tmp_path, Augments, batches, *STOPS)
