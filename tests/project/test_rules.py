from omegaconf import OmegaConf

from project.rules import RULES, needed_files
from samestep.hydra.compose import check
from samestep.run_spec import leaves


def test_every_rule_is_of_a_key():
    keys = {*leaves(OmegaConf.to_container(check([])))}
    assert RULES.keys() - keys == set()


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
