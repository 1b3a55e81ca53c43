import hydra
import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.overrides import list_runs, parse, rewrite
from tests.conftest import CONFIGS


def test_values_are_typed_with_two_pluses_and_choices_are_not():
    groups = {"data": ["mnist"], "logger": ["csv"], "model/head": ["linear"]}
    expected = {
        "seed=1": "++seed=1",
        "+seed=1": "++seed=1",
        "data=mnist": "data=mnist",
        "+data=mnist": "data=mnist",
        "++data=mnist": "data=mnist",
        "+model/head=linear": "+model/head=linear",
        "++model/head=linear": "+model/head=linear",
        "data={root: x}": "++data={root: x}",
        "logger=null": "logger=[]",
        "~logger": "~logger",
        "hydra.verbose=true": "hydra.verbose=true",
    }
    assert [rewrite(override, groups) for override in parse(list(expected))] == [*expected.values()]


def test_values_of_sweeps_are_checked_one_after_the_other_and_ranges_at_their_ends():
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        runs = list_runs(["a=1,2", "b=range(0,100)", "c=3"], multirun=True)
    assert runs == [
        ["a=1", "b=0", "c=3"],
        ["a=2", "b=0", "c=3"],
        ["a=1", "b=99", "c=3"],
    ]


def test_sweeps():
    assert check(["seed=3,4", "model=mlp,cnn"], multirun=True).seed == 3
    assert check(["data=glob(mnist*)", "seed=range(0,100)"], multirun=True).seed == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1,2", "model=mlp,cn"], "model=cn: no such choice; did you mean model=cnn?"),
        (["seed=1,2", "model.optimizer.lr=0.1,-1"], "model.optimizer.lr=-1: must be"),
        (["model=mlp,resnet18", "model.net.dropout=0.1"], "model.net.dropout=0.1: no such key"),
        (["seed=interval(0,1)"], "Can only enumerate"),
    ],
)
def test_every_value_of_a_sweep_is_checked(overrides, message):
    with pytest.raises(ConfigError) as error:
        check(overrides, multirun=True)
    assert message in str(error.value)
