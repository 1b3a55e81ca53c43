"""Wrong arguments are refused by the constructors themselves, before anything is written."""

import pytest
import torch

from project.model.nets.cnn import CNN
from project.model.nets.mlp import MLP
from project.model.nets.resnet18 import ResNet18
from project.model.schedules import warmup_cosine
from samestep.errors import ConfigError
from samestep.hydra import build

IMAGES = {"num_channels": 1, "image_size": 8, "num_classes": 10}


@pytest.mark.parametrize(
    ("net", "arguments"),
    [
        (MLP, {**IMAGES, "hidden_size": 0, "dropout": 0.0}),
        (CNN, {**IMAGES, "channels": (0, 4)}),
        (CNN, {**IMAGES, "channels": (4,)}),
        (CNN, {**IMAGES, "channels": (4, 4), "image_size": 3}),
        (ResNet18, {"num_channels": 1, "num_classes": 10, "width": 0}),
    ],
)
def test_nets_refuse_wrong_arguments(net, arguments):
    with pytest.raises(ValueError, match="must be"):
        net(**arguments)


@pytest.mark.parametrize("warmup", [-0.1, 1.1])
def test_the_schedule_refuses_a_wrong_share(warmup):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="must be a share"):
        warmup_cosine(optimizer, total_steps=10, warmup=warmup)


def test_a_refusal_of_a_constructor_is_an_error_of_the_configuration(compose):
    with pytest.raises(ConfigError, match="hidden_size=0: must be at least 1"):
        build.model(compose("model=mlp", "model.net.hidden_size=0"))
