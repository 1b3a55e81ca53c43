from functools import partial

import pytest
import torch

from samestep.data.order import make_order
from samestep.data.sampler import BatchesOfRank, GlobalBatchSampler, split
from samestep.data.seeds import generator


def orders(num_samples: int, seed: int, shuffle: bool = True):
    return partial(make_order, num_samples, shuffle, seed)


def global_batches(world_size: int, *, num_samples=23, size=6, epoch=0, train=True, **options):
    """Ids of each global batch, put together from the slices of all ranks."""
    samplers = [
        GlobalBatchSampler(
            num_samples, size, rank=rank, world_size=world_size, drop_last=train,
            order_of=orders(num_samples, 5, shuffle=train), **options,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    for sampler in samplers:
        sampler.epoch = epoch
    slices = [list(sampler) for sampler in samplers]
    assert {len(rank) for rank in slices} == {len(samplers[0])}, "ranks take unequal steps"
    return [
        torch.cat([piece.ids for piece in pieces]).tolist() for pieces in zip(*slices, strict=True)
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6])
def test_any_number_of_ranks_sees_the_same_global_batches(world_size: int):
    assert global_batches(world_size) == global_batches(1)


def test_an_epoch_has_full_batches_of_distinct_images():
    batches = global_batches(2)
    assert [len(batch) for batch in batches] == [6, 6, 6]
    assert len({image for batch in batches for image in batch}) == 18


def test_the_order_is_a_function_of_the_epoch():
    assert global_batches(1, epoch=1) == global_batches(1, epoch=1)
    assert global_batches(1, epoch=1) != global_batches(1, epoch=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 30])
def test_an_evaluation_covers_each_image_once_in_order(world_size: int):
    batches = global_batches(world_size, train=False)
    assert [image for batch in batches for image in batch] == list(range(23))


def test_more_ranks_than_images_leaves_some_ranks_an_empty_slice():
    in_order = orders(2, 0, shuffle=False)
    sampler = GlobalBatchSampler(2, 8, rank=3, world_size=4, order_of=in_order, drop_last=False)
    (piece,) = sampler
    assert len(piece.ids) == 0
    assert sampler.has_empty_slices()


def test_slices_know_their_position_in_the_global_batch():
    sampler = GlobalBatchSampler(
        12, 6, rank=1, world_size=3, order_of=orders(12, 0), drop_last=True
    )
    sampler.epoch = 4
    assert [(p.epoch, p.number, p.start, p.global_size) for p in sampler] == [
        (4, 0, 2, 6),
        (4, 1, 2, 6),
    ]


def test_a_pass_can_begin_within_the_epoch_once():
    sampler = GlobalBatchSampler(
        23, 6, rank=0, world_size=1, order_of=orders(23, 5), drop_last=True
    )
    whole = [piece.ids.tolist() for piece in sampler]
    sampler.first_batch = 2
    assert [piece.ids.tolist() for piece in sampler] == whole[2:]
    assert [piece.ids.tolist() for piece in sampler] == whole


def test_accumulated_batches_end_the_epoch_with_a_full_step():
    assert len(global_batches(1, batches_per_step=2)) == 6  # 23 // 6 steps of 2 batches


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [21, 23])
def test_a_step_has_the_same_samples_however_it_is_cut(num_samples: int, world_size: int):
    steps = global_batches(1, size=7, num_samples=num_samples)
    batches = global_batches(world_size, size=7, num_samples=num_samples, batches_per_step=2)
    assert {len(batch) for batch in batches} == {3, 4}
    assert [a + b for a, b in zip(batches[::2], batches[1::2], strict=True)] == steps


@pytest.mark.parametrize(
    ("size", "shares", "lengths"),
    [
        (32, (1.0, 1.0, 1.0), (11, 11, 10)),
        (48, (1.0, 1.0, 1.0), (16, 16, 16)),
        (32, (1.0, 2.5), (9, 23)),
        (32, (1.0, 1.0, 2.0), (8, 8, 16)),
        (4, (100.0, 1.0, 1.0), (2, 1, 1)),
        (64, (1e308, 1e308), (32, 32)),  # their sum is infinite
        (64, (5e-324, 1e308), (1, 63)),
        (3, (9.0, 1.0, 1.0), (1, 1, 1)),
        (2, (1.0, 1.0, 1.0), (1, 1, 0)),
        (0, (1.0, 1.0), (0, 0)),
    ],
)
def test_slices_are_as_long_as_their_shares(size: int, shares, lengths):
    assert split(size, shares) == lengths


@pytest.mark.parametrize("world_size", range(1, 9))
def test_equal_shares_differ_by_one_at_most(world_size: int):
    for size in range(40):
        lengths = split(size, (1.0,) * world_size)
        assert sum(lengths) == size
        assert max(lengths) - min(lengths) <= 1


def test_other_shares_change_the_slices_and_no_batch():
    def batches(*shares: float) -> list[list[torch.Tensor]]:
        samplers = [
            GlobalBatchSampler(
                23, 6, rank=rank, world_size=2, order_of=orders(23, 5), drop_last=True
            )
            for rank in (0, 1)
        ]  # fmt: skip
        for sampler in samplers:
            sampler.shares = shares
        return [[piece.ids for piece in pieces] for pieces in zip(*samplers, strict=True)]

    equal, unequal = batches(1, 1), batches(1, 2)
    assert [[len(part) for part in parts] for parts in unequal] == [[2, 4]] * 3
    for ours, theirs in zip(equal, unequal, strict=True):
        assert torch.equal(torch.cat(ours), torch.cat(theirs))


@pytest.mark.parametrize(
    ("size", "world_size", "batches_per_step", "drop_last", "is_equal"),
    [
        (6, 3, 1, True, True), (6, 3, 2, True, True), (6, 4, 1, True, False),
        (6, 1, 1, True, True), (5, 1, 2, True, False), (6, 3, 1, False, False),
        (23, 1, 1, False, True), (30, 3, 1, True, True),
    ],
)  # fmt: skip
def test_no_weights_are_needed_if_all_slices_are_equal(
    size: int, world_size: int, batches_per_step: int, drop_last: bool, is_equal: bool
):
    for rank in range(world_size):
        sampler = GlobalBatchSampler(
            23, size, rank=rank, world_size=world_size, order_of=orders(23, 0), drop_last=drop_last,
            batches_per_step=batches_per_step,
        )  # fmt: skip
        assert sampler.has_equal_slices() is is_equal
        if is_equal:
            assert {sampler.weight(index) for index in range(len(sampler))} <= {1.0}
        assert sum(sampler.weights_of_ranks()) == pytest.approx(world_size)


def test_neighbouring_seeds_give_unrelated_streams():
    draws = {
        tuple(torch.rand(2, generator=generator(seed, epoch)).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(draws) == 400


@pytest.mark.parametrize(("num", "shares"), [(5, [[0, 2, 4], [1, 3, 0]]), (1, [[0], [0]])])
def test_batches_are_shared_out_over_the_ranks(num: int, shares: list[list[int]]):
    batches = [[number] for number in range(num)]
    ranks = [BatchesOfRank(batches, range(rank, rank + 1), 2) for rank in (0, 1)]
    assert [[number for (number,) in rank] for rank in ranks] == shares
    assert [len(rank) for rank in ranks] == [len(share) for share in shares]
