import torch

from project.data.augment import Augment
from samestep import Slice

IMAGES = torch.arange(1, 6 * 3 * 8 * 8 + 1, dtype=torch.int16).reshape(6, 3, 8, 8)


def where(start: int = 0, count: int = 6, epoch: int = 0, index: int = 0) -> Slice:
    return Slice(torch.arange(start, start + count), epoch, index, start, 6)


def test_a_slice_is_changed_as_in_the_whole_batch():
    augment = Augment(crop_padding=2, flip=True, seed=0)
    whole = augment.change(IMAGES, where())
    parts = [augment.change(IMAGES[start : start + 2], where(start, 2)) for start in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)


def test_crops_are_shifted_windows_of_the_padded_image():
    padding = 2
    cropped = Augment(crop_padding=padding, flip=False, seed=0).change(IMAGES, where())
    padded = torch.nn.functional.pad(IMAGES, (padding,) * 4)
    shifts = set()
    for image, result in zip(padded, cropped, strict=True):
        matches = [
            (row, column)
            for row in range(2 * padding + 1)
            for column in range(2 * padding + 1)
            if torch.equal(image[:, row : row + 8, column : column + 8], result)
        ]
        assert len(matches) == 1
        shifts.add(matches[0])
    assert len(shifts) > 1
