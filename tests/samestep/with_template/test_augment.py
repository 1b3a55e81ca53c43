import torch

from project.data.augment import Augment
from samestep import Slice

IMAGES = torch.arange(1, 6 * 3 * 8 * 8 + 1, dtype=torch.int16).reshape(6, 3, 8, 8)


def where(start: int = 0, count: int = 6, epoch: int = 0, index: int = 0) -> Slice:
    return Slice(torch.arange(start, start + count), epoch, index, start, 6)


def test_flips_mirror_about_half_of_the_images():
    images = torch.arange(8.0).expand(400, 1, 8, 8)
    place = Slice(torch.arange(400), 0, 0, 0, 400)
    flipped = Augment(crop_padding=0, flip=True, seed=0).change(images, place)
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    kept = (flipped == images).flatten(1).all(1)
    assert bool((mirrored ^ kept).all())
    assert 150 < int(mirrored.sum()) < 250


def test_each_epoch_and_batch_draws_anew():
    augment = Augment(crop_padding=2, flip=True, seed=0)
    first = augment.change(IMAGES, where())
    assert torch.equal(first, augment.change(IMAGES, where()))
    assert not torch.equal(first, augment.change(IMAGES, where(epoch=1)))
    assert not torch.equal(first, augment.change(IMAGES, where(index=1)))
    assert not torch.equal(
        first, Augment(crop_padding=2, flip=True, seed=1).change(IMAGES, where())
    )


def test_a_mirrored_crop_is_the_crop_mirrored():
    images = torch.arange(40 * 2 * 8 * 8, dtype=torch.int16).reshape(40, 2, 8, 8)
    place = Slice(torch.arange(40), 0, 0, 0, 40)
    cropped = Augment(crop_padding=2, flip=False, seed=0).change(images, place)
    flipped = Augment(crop_padding=2, flip=True, seed=0).change(images, place)
    kept = (flipped == cropped).flatten(1).all(1)
    assert 0 < int(kept.sum()) < 40
    assert torch.equal(flipped[~kept], cropped[~kept].flip(3))
