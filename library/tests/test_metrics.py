import pytest
import torch

from samestep.metrics import READ_EVERY, EpochMean
from samestep.ranks import devices, process_group


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
    monkeypatch.setattr(process_group, "gather", lambda own: [own, [[6.0, 3.0]]])
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


def test_sums_on_a_device_are_read_together_and_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
):
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    generator = torch.Generator().manual_seed(0)
    sums = [torch.rand((), generator=generator) / 3 for _ in range(READ_EVERY + 7)]

    def add(mean: EpochMean, number: int) -> None:
        loss = sums[number].clone()
        # Whole numbers of this size are exact in 64 bits only.
        tokens = torch.tensor(2**24 + number) if number % 3 else torch.tensor(number / 3)
        mean.update(1, loss=loss, tokens=tokens)
        loss.zero_()

    own, other = EpochMean("train", "loss", "tokens"), EpochMean("train", "loss", "tokens")
    for number in range(len(sums)):
        add(own, number)
    monkeypatch.setattr(devices, "is_at_hand", lambda tensor: False)
    for number in range(len(sums)):
        add(other, number)
    assert len(reads) == 1
    # A checkpoint in the middle reads the rest, and the order of the additions stays.
    continued = EpochMean("train", "loss", "tokens")
    continued.load_state(other.state())
    assert torch.equal(continued.state(), own.state())
    assert other.mean_so_far("loss") == own.mean_so_far("loss")


def test_a_sum_may_be_of_a_validation_and_of_training():
    """On a device: its tensors are kept."""
    sums, loss = EpochMean("all", "loss"), torch.ones((), device="meta")
    with torch.inference_mode():
        sums.update(1, loss=loss)
    sums.update(1, loss=loss)


def test_a_state_has_all_bits_on_a_device_without_64_of_them(monkeypatch: pytest.MonkeyPatch):
    """As Apple's GPUs: what a checkpoint holds must not be rounded."""
    monkeypatch.setattr(EpochMean, "_dtype", lambda self: torch.float32)
    own, continued = EpochMean("train", "loss"), EpochMean("train", "loss")
    own.update(1, loss=torch.tensor(1 + 2**-40, dtype=torch.float64))
    continued.load_state(own.state())
    assert continued.mean_so_far("loss") == 1 + 2**-40
    assert continued.means()["train/loss"].dtype is torch.float32
