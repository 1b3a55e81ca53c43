"""Wrong arguments are refused by the constructors themselves, before anything is written."""

import lightning as L
import pytest
import torch

from project.model.nets.cnn import CNN
from project.model.nets.mlp import MLP
from project.model.nets.resnet18 import ResNet18
from project.model.schedules import warmup_cosine
from samestep.errors import ConfigError
from samestep.hydra import build
from tests.project.model.test_classifier import QUIET

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
        build.build_model(compose("model=mlp", "model.net.hidden_size=0"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.num_channels=3"], r"mean=\[0\.305\]: must have 3 values"),
        (["data.class_names=[a,b,c]"], r"class_names=\['a', 'b', 'c'\]: must have 10 values"),
        (["data.num_classes=3", "data.class_names=[a,b,a]"], "each must be another name"),
        (["data.std=[0]"], r"std=\[0\]: must be numbers above 0"),
        (["data.num_classes=1", "data.class_names=[a]"], "num_classes must be at least"),
        (["data.num_workers=-1"], "num_workers=-1: must be at least 0"),
    ],
)
def test_data_reject_wrong_arguments(compose, overrides, message):
    with pytest.raises(ConfigError, match=message):
        build.build_datamodule(compose(*overrides))


def test_the_model_rejects_wrong_arguments(compose):
    cfg = compose()
    # As a model of the user may be built, whose keys have no rules.
    cfg.model.label_smoothing = 1
    with pytest.raises(ConfigError, match="label_smoothing=1: must be at least 0 and below 1"):
        build.build_model(cfg)


def test_data_without_names_for_the_classes_are_accepted(compose):
    build.build_datamodule(compose("data.class_names=null", "data.num_classes=3"))


def test_the_schedule_needs_an_end(compose):
    cfg = compose()
    trainer = L.Trainer(max_epochs=-1, **QUIET)
    with pytest.raises(ConfigError, match="must know where the run ends"):
        trainer.fit(build.build_model(cfg), build.build_datamodule(cfg))
    assert trainer.global_step == 0
