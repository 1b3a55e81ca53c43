"""What is found before a run begins. Whole runs: test_trainer.py."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from library.tests.callbacks.tiny import Tiny
from samestep import fit_checks
from samestep.errors import ConfigError


class EachStage(L.LightningDataModule):
    """As in Lightning's examples: each stage has its own data."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches

    def setup(self, stage: str) -> None:
        if stage == "test":
            self.test = torch.ones(2 * self.num_batches, 2)

    def test_dataloader(self) -> list[DataLoader]:
        return [DataLoader(self.test, batch_size=1), DataLoader(self.test, batch_size=2)]


@pytest.mark.parametrize(
    ("share", "is_none"), [(0.5, False), (0.4, True), (0.0, False), (1, False)]
)
def test_a_share_of_the_test_that_is_no_batch_is_rejected(share, is_none: bool):
    trainer = L.Trainer(accelerator="cpu", logger=False, limit_test_batches=share)
    arguments = trainer, Tiny(), EachStage(2)
    if not is_none:
        fit_checks.check_limit_of_test(*arguments)
        return
    with pytest.raises(ConfigError, match=r"limit_test_batches=0.4: selects none of the 2 test"):
        fit_checks.check_limit_of_test(*arguments)


class Splits(L.LightningDataModule):
    """Samples a split, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)


def test_lightning_does_not_set_up_again_what_is_set_up():
    data = Splits()
    fit_checks.set_up_data(L.Trainer(accelerator="cpu", logger=False), data)
    with fit_checks.already_set_up(data):
        data.prepare_data()
        data.setup("fit")
        data.setup("fit")  # of the user, in a hook
    data.setup("test")
    assert data.calls == ["prepare", "fit", "fit", "test"]
    with pytest.raises(KeyError), fit_checks.already_set_up(data):
        raise KeyError
    assert not {"setup", "prepare_data"} & vars(data).keys()
