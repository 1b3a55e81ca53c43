import pytest
import torch

from samestep.data.sampler import GlobalBatchSampler, generator


def global_batches(world_size: int, *, num_samples=23, size=6, epoch=0, train=True, **options):
    """Ids of each global batch, put together from the slices of all ranks."""
    samplers = [
        GlobalBatchSampler(
            num_samples, size, rank=rank, world_size=world_size, seed=5, shuffle=train,
            drop_last=train, **options,
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


@pytest.mark.parametrize("world_size", [2, 3, 6])
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
    sampler = GlobalBatchSampler(2, 8, rank=0, world_size=4, seed=0, shuffle=False, drop_last=False)
    (piece,) = sampler
    assert len(piece.ids) == 0


def test_slices_know_their_position_in_the_global_batch():
    sampler = GlobalBatchSampler(12, 6, rank=1, world_size=3, seed=0, shuffle=True, drop_last=True)
    sampler.epoch = 4
    assert [(p.epoch, p.number, p.start, p.global_size) for p in sampler] == [
        (4, 0, 2, 6),
        (4, 1, 2, 6),
    ]


def test_a_pass_can_begin_within_the_epoch_once():
    sampler = GlobalBatchSampler(23, 6, rank=0, world_size=1, seed=5, shuffle=True, drop_last=True)
    whole = [piece.ids.tolist() for piece in sampler]
    sampler.first_batch = 2
    assert [piece.ids.tolist() for piece in sampler] == whole[2:]
    assert [piece.ids.tolist() for piece in sampler] == whole


def test_accumulated_batches_end_the_epoch_with_a_full_step():
    assert len(global_batches(1, size=3, batches_per_step=2)) == 6  # 23 // 6 steps of 2 batches


def test_neighbouring_seeds_give_unrelated_streams():
    draws = {
        tuple(torch.rand(2, generator=generator(seed, epoch)).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(draws) == 400
