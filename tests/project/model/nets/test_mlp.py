import pytest
import torch

from project.model.nets.mlp import MLP


@pytest.mark.parametrize(("num_channels", "image_size"), [(1, 8), (1, 28), (3, 32), (3, 64)])
def test_images_of_any_size_give_one_logit_per_class(num_channels: int, image_size: int):
    net = MLP(
        num_channels=num_channels, image_size=image_size, num_classes=7, hidden_size=20, dropout=0.0
    )
    assert net(torch.randn(5, num_channels, image_size, image_size)).shape == (5, 7)


def test_every_parameter_learns():
    net = MLP(num_channels=1, image_size=8, num_classes=10, hidden_size=20, dropout=0.0)
    net(torch.randn(16, 1, 8, 8)).square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in net.parameters())
