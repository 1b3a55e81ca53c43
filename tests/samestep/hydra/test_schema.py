import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.schema import nearest
from samestep.spec import leaves


def faults(*overrides):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    return str(error.value).splitlines()


def test_unknown_keys_are_refused_with_a_suggestion():
    meant = {
        "dat=mnist": "data=mnist",
        "trainer.max_epoch=3": "trainer.max_epochs=3",
        "lr=0.1": "model.optimizer.lr=0.1",
        "optimizer=sgd": "model/optimizer=sgd",
        "model/optimiser=sgd": "model/optimizer=sgd",
    }
    lines = [f"{typed}: no such key; did you mean {key}?" for typed, key in meant.items()]
    assert sorted(faults(*meant)) == sorted(lines)


def test_unknown_keys_without_a_like_one_name_those_there_are():
    train = "train.yaml has seed, run_id, run_root, run_dir, allow_changes, notes, tags, "
    cluster = "no such key; cluster has name, download, timeout_s, shares"
    second, first = faults("typo=1", "cluster.typo=1")
    assert first.startswith(f"typo=1: no such key; {train}")
    assert second == f"cluster.typo=1: {cluster}"


def test_plus_adds_no_keys_to_what_is_ours():
    added = ["callbacks.checkpoints.typo=1", "cluster.typo.deep=1", "trainer.typo=1", "typo=1"]
    lines = faults(*(f"+{line}" for line in added))
    assert sorted(line.partition(": no such key; ")[0] for line in lines) == added
    assert faults("++typo=1")[0].startswith("typo=1: no such key; train.yaml has seed, ")


def test_keys_within_a_value_are_checked():
    assert faults("data={crop_padding: 0, croppadding: 1}") == [
        "data.croppadding=1: no such key; did you mean data.crop_padding=1?"
    ]


def test_a_key_of_another_cluster_is_unknown():
    assert faults("cluster.min_nodes=1")[0].startswith("cluster.min_nodes=1: no such key; ")


def test_plus_adds_arguments_to_the_users_own_classes():
    added = [
        "model.net.typo=1",
        "model.typo=1",
    ]  # samestep.hydra.build compares them with the signature
    assert check([f"+{line}" for line in added]).model.typo == 1
    assert sorted(line.partition(": no such key; ")[0] for line in faults(*added)) == added


def test_a_plus_changes_nothing_where_the_key_is_there():
    assert check(["+seed=1"]) == check(["seed=1"])


def test_our_keys_cannot_be_removed():
    removed = ["~data.root", "~model.net.num_classes", "~seed", "~trainer._target_"]
    lines = faults(*removed)
    assert sorted(lines) == [f"{key}: a run needs this key" for key in removed]
    assert faults("~typo") == ["Could not delete from config. 'typo' does not exist."]


def test_open_nodes_take_more_keys_and_fewer():
    cfg = check(["+model.optimizer.amsgrad=true", "~model.optimizer.fused"])
    assert cfg.model.optimizer.amsgrad
    assert "fused" not in cfg.model.optimizer


def test_a_new_key_of_an_open_node_needs_no_plus():
    assert check(["model.optimizer.amsgrad=true"]).model.optimizer.amsgrad


def test_flags_of_the_trainer_need_not_be_in_the_file():
    assert check(["trainer.detect_anomaly=true"]).trainer.detect_anomaly
    assert check(["+trainer.benchmark=true"]).trainer.benchmark
    assert faults("trainer.detect_anomly=true") == [
        "trainer.detect_anomly=true: no such key; did you mean trainer.detect_anomaly=true?"
    ]


def test_a_node_with_another_target_is_open():
    check(["model.net._target_=some.Net", "+model.net.depth=3", "~model.net.image_size"])


def test_collections_take_whole_nodes():
    node = "{_target_: some.Thing, depth: {a: 1}}"
    check([f"+callbacks.mine={node}", f"+logger.mine={node}"])
    first, second = faults("+callbacks.mine.depth=1", "+logger.mine=1")
    assert first.startswith("callbacks.mine.depth=1: no such key")
    assert second.startswith("logger.mine=1: no such key")


def test_nodes_of_collections_can_be_left_out():
    assert "predictions" not in check(["~callbacks.predictions"]).callbacks
    (line,) = faults("callbacks.predictions=null")
    assert line.endswith(": must be a group of keys")


def test_values_are_of_the_type_of_their_default():
    must_be = {
        "data.download=3": "true or false",  # the default is another key's value
        "data.source=digits": "a group of keys",
        "data.flip=[true]": "true or false",
        "model.optimizer=sgd": "a group of keys; a file is chosen by model/optimizer=NAME",
        "trainer.detect_anomaly=null": "true or false",
    }
    assert faults(*must_be) == [f"{line}: must be {text}" for line, text in must_be.items()]
    (line,) = faults("cluster.name=3")
    assert line.startswith("cluster.name=3: must be a string (to pass 1 as a string: key=")


def test_null_is_a_value_of_open_nodes():
    assert check(["model.optimizer.fused=null"]).model.optimizer.fused is None


def test_a_default_of_null_takes_a_node():
    check(["trainer.profiler={_target_: some.Profiler}"])
    (line,) = faults("trainer.profiler={depth: 1}")
    assert "must be null or one of simple" in line


def test_values_that_are_not_set():
    assert faults("data=folder") == [
        "data.root is not set: add data.root=VALUE (configs/data/folder.yaml)",
        "data.num_classes is not set: add data.num_classes=VALUE (configs/data/folder.yaml)",
    ]


def test_interpolations_resolve_and_are_named_once():
    why = {
        "seed=${nothing}": "Interpolation key 'nothing' not found",  # not again for data.seed
        "run_dir=${nothing:1}": "Unsupported interpolation type nothing",
        "data.root=${oc.env:NO_SUCH_NAME}": "\"Environment variable 'NO_SUCH_NAME' not found\"",
        "data.num_val=${data.num_val}": "Recursive interpolation detected",
    }
    assert faults(*why) == [f"{line}: {text}" for line, text in why.items()]
    (line,) = faults("data.mean=['${nothing}']")
    assert "Interpolation key 'nothing' not found" in line


def test_interpolated_values_are_checked():
    (line,) = faults("data.num_workers=${trainer.accelerator}")
    assert line.startswith("data.num_workers=${trainer.accelerator}: must be a whole number")
    check(["data.num_workers=${trainer.devices}"])


def test_values_are_checked_where_they_are_written_not_where_they_are_used():
    assert faults("seed=-1") == ["seed=-1: must be a whole number from 0 to 4294967295"]


def test_nearest():
    assert nearest("mnsit", ["mnist", "digits"]) == "mnist"
    assert nearest("x.lr", ["a.lr", "x.l"]) == "a.lr"
    assert nearest("typo", ["digits"]) is None
    assert nearest("typo", []) is None


def test_leaves():
    assert leaves({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
