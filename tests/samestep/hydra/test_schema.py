import pytest

from samestep.errors import ConfigError
from samestep.hydra.compose import check


def faults(*overrides):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    return str(error.value).splitlines()


def test_unknown_keys_are_rejected_with_a_suggestion():
    meant = {
        "dat=mnist": "data=mnist",
        "trainer.max_epoch=3": "trainer.max_epochs=3",
        "lr=0.1": "model.optimizer.lr=0.1",
        "optimizer=sgd": "model/optimizer=sgd",
        "model/optimiser=sgd": "model/optimizer=sgd",
        "trainer.detect_anomly=true": "trainer.detect_anomaly=true",
    }
    lines = [f"{typed}: no such key; did you mean {key}?" for typed, key in meant.items()]
    assert sorted(faults(*meant)) == sorted(lines)


def test_keys_of_other_projects_are_known():
    meant = {
        "data.batch_size=8": "data.global_batch_size=8",
        "trainer.batch_size=8": "data.global_batch_size=8",
        "data.val_batch_size=8": "data.eval_batch_size=8",
        "trainer.gpus=2": "trainer.devices=2",
        "optimizer.name=sgd": "model/optimizer=sgd",
        "model.lr=0.1": "model.optimizer.lr=0.1",
        "task_name=mine": "run_id=mine",
    }
    lines = [f"{typed}: no such key; did you mean {key}?" for typed, key in meant.items()]
    assert sorted(faults(*meant)) == sorted(lines)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        # Other names with most of the letters of a key.
        ("model.hidden_size=3", "model has "),
        ("model.dropout=0.1", "model has "),
        ("train=false", "train.yaml has "),
        # A name of another thing: cluster.name.
        ("model.name=mine", "model has "),
        ("logger.wandb.name=mine", "its file is not chosen; add logger=wandb"),
        ("ckpt_path=last.ckpt", "a run continues by its name: repeat the command with RUN_ID"),
    ],
)
def test_what_was_not_meant_is_not_suggested(word: str, hint: str):
    (line,) = faults(word)
    assert line.startswith(f"{word}: no such key; {hint}")


NODE = "{_target_: some.Thing, depth: {a: 1}}"


@pytest.mark.parametrize(
    ("words", "lines"),  # how each line begins
    [
        # Without a like one, those that there are.
        (
            ["typo=1", "cluster.typo=1"],
            ["cluster.typo=1: no such key; cluster has name, download, timeout_s, shares",
             "typo=1: no such key; train.yaml has project, seed, run_id, run_root, run_dir, "],
        ),
        (["++typo=1"], ["typo=1: no such key; train.yaml has project, seed, "]),
        # Keys within a value, and keys of another cluster.
        (["data={crop_padding: 0, croppadding: 1}"],
         ["data.croppadding=1: no such key; did you mean data.crop_padding=1?"]),
        (["cluster.min_nodes=1"], ["cluster.min_nodes=1: no such key; "]),
        (["~typo"], ["Could not delete from config. 'typo' does not exist."]),
        # Collections take whole nodes.
        (["+callbacks.mine.depth=1", "+logger.mine=1"],
         ["callbacks.mine.depth=1: no such key", "logger.mine=1: no such key"]),
        (["callbacks.predictions=null"], ["callbacks.predictions=null: must be a group of keys"]),
        (["cluster.name=3"], ["cluster.name=3: must be a string (to pass 1 as a string: key="]),
        (["trainer.profiler={depth: 1}"],
         ['trainer.profiler={"depth": 1}: must be null or one of simple']),
        (["data=folder"],
         ["data.root is not set: add data.root=VALUE (configs/data/folder.yaml)",
          "data.num_classes is not set: add data.num_classes=VALUE (configs/data/folder.yaml)"]),
        # Interpolated values are checked, and values where they are written, not where used.
        (["data.num_workers=${trainer.accelerator}"],
         ["data.num_workers=${trainer.accelerator}: must be a whole number"]),
        (["seed=-1"], ["seed=-1: must be a whole number from 0 to 4294967295"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_rejected(words: list[str], lines: list[str]):
    found = faults(*words)
    assert len(found) == len(lines)
    for line, start in zip(found, lines, strict=True):
        assert line.startswith(start)


def test_plus_adds_no_keys_to_what_is_ours_and_to_own_classes_what_they_take():
    added = ["callbacks.checkpoints.typo=1", "cluster.typo.deep=1", "trainer.typo=1", "typo=1"]
    lines = faults(*(f"+{line}" for line in added))
    assert sorted(line.partition(": no such key; ")[0] for line in lines) == added
    added = ["model.net.typo=1", "model.typo=1"]  # samestep.hydra.build knows their signatures
    assert check([f"+{line}" for line in added]).model.typo == 1
    assert sorted(line.partition(": no such key; ")[0] for line in faults(*added)) == added
    assert check(["+seed=1"]) == check(["seed=1"])


def test_our_keys_cannot_be_removed():
    removed = ["~data.seed", "~model.net.num_classes", "~seed", "~trainer._target_"]
    assert sorted(faults(*removed)) == [f"{key}: a run needs this key" for key in removed]


def test_open_nodes_take_more_keys_and_fewer():
    cfg = check(["model.optimizer.amsgrad=true", "~model.optimizer.fused"])  # it needs no plus
    assert cfg.model.optimizer.amsgrad
    assert "fused" not in cfg.model.optimizer
    assert check(["model.optimizer.fused=null"]).model.optimizer.fused is None
    check(["model.net._target_=some.Net", "+model.net.depth=3", "~model.net.image_size"])
    check([f"+callbacks.mine={NODE}", f"+logger.mine={NODE}"])
    assert "predictions" not in check(["~callbacks.predictions"]).callbacks
    check(["trainer.profiler={_target_: some.Profiler}", "data.num_workers=${trainer.devices}"])


def test_flags_of_the_trainer_need_not_be_in_the_file():
    trainer = check(["trainer.detect_anomaly=true", "+trainer.benchmark=true"]).trainer
    assert (trainer.detect_anomaly, trainer.benchmark) == (True, True)


def test_values_are_of_the_type_of_their_default():
    must_be = {
        "data.download=3": "true or false",  # the default is another key's value
        "data.dataset=digits": "a group of keys",
        "data.flip=[true]": "true or false",
        "model.optimizer=sgd": "a group of keys; a file is chosen by model/optimizer=NAME",
        "trainer.detect_anomaly=null": "true or false",
    }
    expected = [f"{line}: must be {text}" for line, text in must_be.items()]
    assert sorted(faults(*must_be)) == sorted(expected)


def test_interpolations_resolve_and_are_named_once():
    why = {
        "seed=${nothing}": "Interpolation key 'nothing' not found",  # not again for data.seed
        "run_dir=${nothing:1}": "Unsupported interpolation type nothing",
        "data.root=${oc.env:NO_SUCH_NAME}": "\"Environment variable 'NO_SUCH_NAME' not found\"",
        "data.num_val=${data.num_val}": "Recursive interpolation detected",
    }
    assert sorted(faults(*why)) == sorted(f"{line}: {text}" for line, text in why.items())
    (line,) = faults("data.mean=['${nothing}']")
    assert "Interpolation key 'nothing' not found" in line
