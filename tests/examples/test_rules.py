"""Each rule of an example is that of a key which its configs have."""

import importlib

import pytest
from omegaconf import OmegaConf

from samestep.hydra.compose import check
from samestep.run_spec import leaves

OWN_IMAGES = ["data.root=images", "data.num_classes=2"]
CHOICES = {
    "language": ["experiment=language"],
    "tables": ["data=lance", *OWN_IMAGES],
    "finetune": ["experiment=finetune", *OWN_IMAGES, "callbacks.finetuning.weights=null"],
}


@pytest.mark.parametrize("example", CHOICES)
def test_every_rule_is_of_a_key(example: str):
    keys = {*leaves(OmegaConf.to_container(check(CHOICES[example])))}
    rules = importlib.import_module(f"examples.{example}.rules").RULES
    assert rules.keys() - keys == set()
