from samestep.hydra.origins import find_overridden
from tests.samestep.hydra.conftest import write


def test_overridden_keys_are_named_with_what_has_set_them(configs):
    write(configs, "experiment/base", "defaults: [override /model/optimizer: sgd]", "seed: 3")
    write(configs, "experiment/mine", "defaults: [base, _self_]", "seed: 4", "data: {shuffle: no}")
    write(configs, "local/default", "data: {root: /data}")
    typed = ["experiment=mine", "model=mlp", "+x.y=1", "~logger", "model/lr_scheduler=none"]
    choices = {"experiment": "mine", "debug": None, "local": "default", "model": "mlp"}
    assert find_overridden(choices, typed) == {
        "model.optimizer": "configs/experiment/base.yaml",
        "seed": "configs/experiment/mine.yaml",
        "data.shuffle": "configs/experiment/mine.yaml",
        "data.root": "configs/local/default.yaml",
        **dict.fromkeys(
            ["experiment", "model", "x.y", "logger", "model.lr_scheduler"], "the command line"
        ),
    }
