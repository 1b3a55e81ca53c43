import pytest
from omegaconf import OmegaConf

from project.rules import RULES, needed_files
from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.run_spec import leaves


def fault(*overrides):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    return str(error.value)


def test_every_rule_is_of_a_key():
    keys = {*leaves(OmegaConf.to_container(check([])))}
    assert RULES.keys() - keys == set()


def test_contradictions():
    assert fault("data.mean=[0,1]", "data.class_names=[a,b,c]").splitlines() == [
        "data.mean=[0, 1]: must have one for each of data.num_channels=1",
        "data.class_names=['a', 'b', 'c']: must have one for each of data.num_classes=10",
    ]
    assert fault("data.num_channels=3").splitlines() == [
        "data.mean=[0.305]: must have one for each of data.num_channels=3",
        "data.std=[0.376]: must have one for each of data.num_channels=3",
    ]


def test_the_schedule_needs_an_end():
    assert "must know where the run ends" in fault("trainer.max_epochs=-1")
    check(["trainer.max_epochs=-1", "trainer.max_steps=100"])


def test_files_that_a_run_does_not_download():
    def needed(*overrides):
        return needed_files(check(list(overrides)))

    assert needed("data=mnist") == []
    assert needed("data=digits", "data.download=false") == []
    assert needed("data=mnist", "data.download=false", "data.root=/images")[0] == (
        "/images/train-images-idx3-ubyte"
    )
    folder = ["data=folder", "data.root=pets", "data.num_classes=2"]
    assert needed(*folder, "data.download=false") == ["pets/train", "pets/test"]
