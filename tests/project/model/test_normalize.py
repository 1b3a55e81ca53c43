import pytest
import torch

from project.model.normalize import Normalize


@pytest.mark.parametrize("shape", [(128, 1, 28, 28), (7, 3, 33, 33), (0, 3, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_images_are_normalized_with_one_rounding_and_the_given_ones_are_kept(shape, dtype):
    channels = shape[1]
    mean, std = [0.1, 0.4, 0.5][:channels], [0.3, 0.2, 0.25][:channels]
    normalize = Normalize(mean=mean, std=std, image_size=shape[-1])
    numbers = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, shape, generator=numbers).to(dtype)
    before = images.clone()
    scale = 1 / (255 * torch.tensor(std).view(-1, 1, 1))
    shift = -255 * torch.tensor(mean).view(-1, 1, 1) * scale
    expected = torch.addcmul(shift, images.float(), scale)
    assert torch.equal(normalize(images), expected)
    assert torch.equal(images, before)
