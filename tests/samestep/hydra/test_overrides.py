from pathlib import Path
from unittest.mock import Mock

import hydra
import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check, check_all
from samestep.hydra.overrides import list_options, parse, rewrite
from tests.conftest import CONFIGS

NETS = "project.nets"


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


def test_each_value_of_a_sweep_is_checked_and_a_range_at_its_ends():
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        options = list_options(["a=1,2", "b=range(0,100)", "c=3"], multirun=True)
    assert options == [["a=1", "a=2"], ["b=0", "b=99"], ["c=3"]]


def test_two_hundred_values_are_composed_once(monkeypatch: pytest.MonkeyPatch):
    compose = Mock(side_effect=hydra.compose)
    monkeypatch.setattr(hydra, "compose", compose)
    seeds, rates = range(200), [0.1, 0.2, 0.3]
    words = [f"seed={','.join(map(str, seeds))}", "model.optimizer.lr=0.1,0.2,0.3"]
    found = check_all(words, multirun=True, read=lambda cfg: (cfg.seed, cfg.model.optimizer.lr))
    assert found == [*((seed, 0.1) for seed in seeds), *((0, rate) for rate in rates[1:])]
    # The configuration and its reference.
    assert compose.call_count == 2
    # Once for each choice of a file.
    words += ["model=mlp,cnn,resnet18"]
    check(words, multirun=True)
    assert compose.call_count == 2 + 3 * 2


@pytest.mark.parametrize(
    ("key", "values", "others"),
    [
        ("seed", ["1", "2", "-1"], []),
        ("model.optimizer.lr", ["0.1", "null", "fast"], []),
        ("report", ["true", "false", "3"], []),
        ("data.mean", ["[0.1]", "[0.2]", "[a]"], []),
        ("callbacks.checkpoints.mode", ["min", "max"], ["callbacks.checkpoints.monitor=val/loss"]),
        # The rule of the second key is broken, which refers to the first.
        ("data.num_workers", ["1", "0"], ["trainer.max_epochs=${data.num_workers}"]),
        ("notes", ["HOME", "NO_SUCH"], ["+tags=['${oc.env:${notes}}']"]),
        ("notes", ["a", "${no.such}"], []),
        ("run_root", ["here", ".."], ["run_dir=${run_root}"]),
        ("run_root", ["here", "'~/there'", "'~no-one/there'"], []),
        ("trainer.strategy", ["auto", "{depth: 1}"], []),
        # The keys of another class are not known.
        ("model.net._target_", ["torch.nn.Identity", f"{NETS}.cnn.CNN"], ["model.net.a=1"]),
        ("model", ["cnn", "cn"], []),
        ("model/optimizer", ["adamw", "adam"], []),
    ],
)
def test_a_wrong_value_of_a_sweep_has_the_message_of_a_single_one(key, values, others):
    *valid, wrong = values
    assert check([f"{key}={','.join(valid)}", *others], multirun=True)
    with pytest.raises(ConfigError) as single:
        check([f"{key}={wrong}", *others])
    with pytest.raises(ConfigError) as swept:
        check([f"{key}={','.join(values)}", *others], multirun=True)
    assert str(swept.value) == str(single.value)


def test_a_value_with_which_a_file_cannot_be_resolved_is_wrong(configs: Path):
    with (configs / "train.yaml").open("a") as file:
        file.write("home: ${oc.env:${notes}}\n")
    assert check(["notes=HOME,PATH"], multirun=True)
    with pytest.raises(ConfigError, match="Environment variable 'NO_SUCH' not found"):
        check(["notes=HOME,NO_SUCH"], multirun=True)


def test_sweeps():
    assert check(["seed=3,4", "model=mlp,cnn"], multirun=True).seed == 3
    assert check(["data=glob(mnist*)", "seed=range(0,100)"], multirun=True).seed == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1,2", "model=mlp,cn"], "model=cn: no such choice; did you mean model=cnn?"),
        (["seed=1,2", "data.global_batch_size=8,0"], "data.global_batch_size=0: must be"),
        (["model=mlp,resnet18", "model.net.dropout=0.1"], "model.net.dropout=0.1: no such key"),
        (["seed=interval(0,1)"], "Can only enumerate"),
    ],
)
def test_every_value_of_a_sweep_is_checked(overrides, message):
    with pytest.raises(ConfigError) as error:
        check(overrides, multirun=True)
    assert message in str(error.value)
