import pytest
import torch

from project.data.augment import Augment, Normalize
from samestep.data.sampler import Slice

IMAGES = torch.arange(1, 6 * 3 * 8 * 8 + 1, dtype=torch.int16).reshape(6, 3, 8, 8)


def where(start: int = 0, count: int = 6, epoch: int = 0, index: int = 0) -> Slice:
    return Slice(torch.arange(start, start + count), epoch, index, start, 6)


def test_a_slice_is_changed_as_in_the_whole_batch():
    augment = Augment(crop_padding=2, flip=True, seed=0)
    whole = augment(IMAGES, where())
    parts = [augment(IMAGES[start : start + 2], where(start, 2)) for start in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)


def test_crops_are_shifted_windows_of_the_padded_image():
    padding = 2
    cropped = Augment(crop_padding=padding, flip=False, seed=0)(IMAGES, where())
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


@pytest.mark.parametrize("shape", [(128, 1, 28, 28), (7, 3, 33, 33), (0, 3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_are_normalized_with_one_rounding_and_the_given_ones_are_kept(shape, dtype):
    channels = shape[1]
    mean, std = [0.1, 0.4, 0.5][:channels], [0.3, 0.2, 0.25][:channels]
    normalize = Normalize(mean, std, image_size=shape[-1])
    numbers = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, shape, generator=numbers).to(dtype)
    before = images.clone()
    scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
    shift = -255 * torch.tensor(mean).view(-1, 1, 1) * scale
    expected = torch.addcmul(shift, images.float(), scale)
    assert torch.equal(normalize(images), expected)
    assert torch.equal(images, before)
