import pytest
import torch
from torch import distributed as dist

from samestep.metrics import EpochMean


def test_unequal_batches_have_the_mean_of_all_samples():
    sums = EpochMean("val", "loss", "right")
    sums.update(1, loss=torch.tensor(4.0), right=torch.tensor(0))
    sums.update(3, loss=torch.tensor(2.0), right=torch.tensor(2))
    assert sums.mean_so_far("loss") == 1.5
    assert {name: mean.item() for name, mean in sums.means().items()} == {
        "val/loss": 1.5,
        "val/right": 0.5,
    }


def test_reading_the_means_begins_a_new_epoch():
    sums = EpochMean("train", "loss")
    sums.update(2, loss=torch.tensor(8.0))
    assert sums.means()["train/loss"] == 4
    sums.update(1, loss=torch.tensor(1.0))
    assert sums.means()["train/loss"] == 1


def test_all_ranks_are_added_up_also_one_without_samples(monkeypatch: pytest.MonkeyPatch):
    def add_the_other_rank(totals: torch.Tensor) -> None:
        assert totals.tolist() == [0, 0]
        totals += torch.tensor([6.0, 3.0])

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", add_the_other_rank)
    assert EpochMean("val", "loss").means()["val/loss"] == 2


def test_the_state_goes_on():
    first, second = EpochMean("train", "loss"), EpochMean("train", "loss")
    first.update(2, loss=torch.tensor(8.0))
    second.load_state(first.state())
    second.update(2, loss=torch.tensor(0.0))
    assert second.means()["train/loss"] == 2
    assert first.means()["train/loss"] == 4, "the state was copied"


def test_sums_are_no_weights():
    assert not EpochMean("train", "loss").state_dict()


def test_a_sum_may_be_of_a_validation_and_of_training():
    """On a device: its tensors are kept."""
    sums, loss = EpochMean("all", "loss"), torch.ones((), device="meta")
    with torch.inference_mode():
        sums.update(1, loss=loss)
    sums.update(1, loss=loss)
