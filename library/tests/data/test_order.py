"""Orders of an epoch: each is a permutation, and a pure function of the seed and the epoch."""

import pytest
import torch

from samestep.data import order
from samestep.data.order import Blocks, make_order

SHUFFLES = {"drawn": True, "cipher": True, "blocks": Blocks(4, at_once=3), "one": Blocks(1, 1)}


@pytest.fixture(params=SHUFFLES)
def shuffle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool | Blocks:
    if request.param == "cipher":
        monkeypatch.setattr(order, "MAX_PERMUTATION", 0)
    return SHUFFLES[request.param]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 17, 257])
def test_each_sample_comes_once_however_the_epoch_is_cut(shuffle: bool | Blocks, num_samples: int):
    whole = make_order(num_samples, shuffle, 0, 0)(0, num_samples)
    assert whole.dtype == torch.int64
    assert sorted(whole.tolist()) == list(range(num_samples))
    for size in (1, 5, 8):
        cut = make_order(num_samples, shuffle, 0, 0)
        starts = range(0, num_samples, size)
        parts = [cut(start, min(start + size, num_samples)) for start in starts]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(torch.cat([cut(s, min(s + size, num_samples)) for s in starts]), whole)
    assert len(make_order(num_samples, shuffle, 0, 0)(0, 0)) == 0


def test_the_order_depends_on_seed_and_epoch(shuffle: bool | Blocks):
    orders = {
        tuple(make_order(257, shuffle, *numbers)(0, 257).tolist())
        for numbers in ((0, 0), (0, 1), (1, 0), (1, 1))
    }
    assert len(orders) == 4


@pytest.mark.parametrize("is_large", [False, True])
def test_a_full_shuffle_has_no_trace_of_the_old_order(
    monkeypatch: pytest.MonkeyPatch, is_large: bool
):
    num = 10_000
    if is_large:
        monkeypatch.setattr(order, "MAX_PERMUTATION", 0)
    positions = torch.arange(num)
    for epoch in range(5):
        ids = make_order(num, True, 3, epoch)(0, num)
        # Of a random permutation: a third of the length, one fixed point, no correlation.
        assert (ids - positions).abs().float().mean() / num == pytest.approx(1 / 3, rel=0.03)
        assert (ids == positions).sum() <= 8
        assert (ids.diff() == 1).sum() <= 8
        table = torch.stack([positions[:-1], ids[:-1], ids[1:]]).float()
        assert (torch.corrcoef(table) - torch.eye(3)).abs().max() < 0.05


def test_a_very_large_set_needs_no_memory_and_no_start():
    cut = make_order(10**11, True, 0, 0)
    ids = cut(10**11 - 1000, 10**11)
    assert len(set(ids.tolist())) == 1000
    assert 0 <= int(ids.min()) < int(ids.max()) < 10**11


def test_a_batch_touches_few_blocks():
    cut = make_order(100 * 64, Blocks(64, at_once=4), 0, 0)
    for start in range(0, 6400, 256):
        assert len((cut(start, start + 256) // 64).unique()) == 4
    # Neighbouring samples of a block do not stay neighbours.
    assert (cut(0, 256).diff() == 1).sum() <= 8
