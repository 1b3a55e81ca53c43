import pytest
import torch

from project.model.nets.resnet18 import ResNet18


@pytest.mark.parametrize(("num_channels", "image_size"), [(1, 8), (1, 28), (3, 32), (3, 64)])
def test_images_of_any_size_give_one_logit_per_class(num_channels: int, image_size: int):
    net = ResNet18(num_channels=num_channels, num_classes=7, width=4)
    assert net(torch.randn(5, num_channels, image_size, image_size)).shape == (5, 7)


def test_every_parameter_learns():
    net = ResNet18(num_channels=1, num_classes=10, width=4)
    net(torch.randn(16, 1, 8, 8)).square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in net.parameters())
