import re

import pytest

from project.rules import MAY_CHANGE, RULES
from samestep.errors import ConfigError
from samestep.hydra.compose import check


def fault(*overrides):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    return str(error.value)


def test_the_message_says_value_and_rule():
    line = "data.eval_batch_size=0"
    assert fault(line) == f"{line}: must be a whole number at least 1"
    line = "model.optimizer.lr=-1"
    assert fault(line) == f"{line}: must be a number above 0 or null"


def test_a_folder_of_images_must_be_named():
    message = fault("data=folder", "data.num_classes=2")
    assert message == "data.root is not set: add data.root=VALUE (configs/data/folder.yaml)"
    assert check(["data=folder", "data.num_classes=2", "data.root=pets"]).data.root == "pets"


def test_a_model_of_another_task_is_named():
    message = fault("data=skeleton")
    assert message.startswith("project.model.classifier.ImageClassifier needs data.")
    assert message.endswith("; choose data and a model of one task")


@pytest.mark.parametrize(
    "overrides",
    [
        ["+model.net.width=0.75"],
        ["model.net._target_=mine.Net", "+model.net.width=0.75", "model.net.channels=3"],
        ["model.net._target_=mine.Net", "+model.net.dropout=1.0", "+model.net.hidden_size=[8, 8]"],
        ["model/optimizer=sgd", "model.optimizer.momentum=1.0"],
        ["model.optimizer._target_=mine.Sgd", "model.optimizer.lr=0", "~model.optimizer.fused"],
        ["model.lr_scheduler._target_=mine.schedule", "model.lr_scheduler.warmup=500"],
        ["+callbacks.mine={_target_: mine.Callback, mode: fast, patience: -1, decay: 3}"],
        ["callbacks.progress._target_=mine.Progress", "callbacks.progress.log_every_s=0"],
    ],
    ids=" ".join,
)
def test_no_rule_is_about_the_users_own_nets_optimizers_and_callbacks(overrides):
    check(overrides)


def test_a_continued_run_may_read_its_data_elsewhere_and_be_compiled():
    for key in ("data.root", "data.download", "data.mirror", "data.num_workers", "model.compile"):
        assert any(re.fullmatch(pattern, key) for pattern in MAY_CHANGE)


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("data.global_batch_size", [1, 512], [0, -1, 0.5, "1", True]),
        ("data.class_names", [None, ["a", "b"]], [["a", 1], "a", [""]]),
        ("model.optimizer.lr", [1e-3, 1, None], [0, -1, "abc", float("nan"), float("inf"), True]),
    ],
)
def test_rule(key, right, wrong):
    rule = RULES[key]
    assert [value for value in right if not rule.holds(value)] == []
    assert [value for value in wrong if rule.holds(value)] == []
