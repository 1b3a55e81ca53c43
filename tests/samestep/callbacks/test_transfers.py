"""What a DataModule or a module does where a batch is moved to the device."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.samestep.callbacks.interrupted import Learner, fit
from tests.samestep.callbacks.test_loader_states import Sized

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")


class Counts(L.LightningDataModule):
    """Counts the batches of the training in one of the hooks of the transfer."""

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

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]


class CountsAfter(Counts):
    on_before_batch_transfer = L.LightningDataModule.on_before_batch_transfer

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.count(batch)


class CountsWhileMoving(Counts):
    on_before_batch_transfer = L.LightningDataModule.on_before_batch_transfer

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return self.count(batch)


@pytest.mark.parametrize("kind", [Counts, CountsAfter, CountsWhileMoving])
def test_a_batch_that_is_not_trained_on_is_not_counted(tmp_path: Path, kind: type):
    (whole,) = fit(tmp_path / "whole", kind)
    # Lightning has moved the next batch before the ranks agree to stop.
    parts = fit(tmp_path / "parts", kind, [(0, 1), (0, 3), (1, 2)])
    assert [batch for part in parts for batch in part.seen] == whole.seen
    assert torch.equal(parts[-1].layer.weight, whole.layer.weight)


class Augments(Learner):
    """As with Kornia: random transforms on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + torch.randn(batch.shape) if self.trainer.training else batch


def test_random_transforms_on_the_device_do_not_depend_on_interruptions(tmp_path: Path):
    (whole,) = fit(tmp_path / "whole", Sized, model=Augments)
    parts = fit(tmp_path / "parts", Sized, [(0, 1), (0, 3), (1, 2)], model=Augments)
    assert [batch for part in parts for batch in part.seen] == whole.seen
