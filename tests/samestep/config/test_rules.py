from fnmatch import fnmatchcase

import pytest

from samestep.config.compose import check
from samestep.config.rules import RULES
from samestep.config.schema import leaves, plain
from samestep.errors import ConfigError


def fault(*overrides):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    return str(error.value)


def rule_of(key):
    return next(
        rule for keys, rule in RULES.items() if any(fnmatchcase(key, k) for k in keys.split())
    )


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("seed", [0, 2**32 - 1], [-1, 2**32, 1.0, True, "1", None]),
        ("run_id", [None, "a", "0.b_c-D", "x" * 63], ["", ".a", "a/b", "a b", "x" * 64, 5, "é"]),
        ("run_root", ["runs", "/big/runs"], ["", " ", None, 3]),
        ("data.global_batch_size", [1, 512], [0, -1, 0.5, "1", True]),
        ("data.num_classes", [2], [1, 0]),
        ("data.num_workers", [0, 2], [-1, None]),
        ("data.class_names", [None, ["a", "b"]], [["a", 1], "a", [""]]),
        ("data.std", [[0.5, 1]], [[0], [0.5, -1]]),
        ("model.optimizer.lr", [1e-3, 1], [0, -1, "abc", float("nan"), float("inf"), True, None]),
        ("model.optimizer.momentum", [0, 0.99], [1, -0.1]),
        ("model.label_smoothing", [0.0, 0.1], [1, -0.1, "x"]),
        ("model.lr_scheduler.warmup", [0, 0.1, 1.0], [-0.1, 1.1]),
        ("model.lr_scheduler.pct_start", [0.25], [0, 1]),
        ("callbacks.ema.decay", [0.99], [0, 1]),
        ("model.net.channels", [[32, 64]], [[32, 0], 32]),
        ("cluster.timeout_s", [300, 0.5], [0, -1]),
        ("trainer.accelerator", ["auto", "cpu"], ["cuda0", None]),
        ("trainer.devices", [1, 8, "auto"], [0, -1, "1", True, [0, 1]]),
        ("trainer.precision", ["32-true", "bf16-mixed"], ["bf16", 32]),
        ("trainer.max_epochs", [1, -1], [0, -2, 1.0, -1.0]),
        ("trainer.limit_val_batches", [None, 0, 3, 0.5, 1.0], [1.5, -1, "3"]),
        ("trainer.overfit_batches", [0.0, 1], [None, 2.5]),
        ("trainer.fast_dev_run", [True, False, 5], [0, "yes"]),
        ("trainer.val_check_interval", [None, 1, 100, 0.5, 1.0], [0, 0.0, 1.5]),
        ("trainer.gradient_clip_val", [None, 0.5], [0, -1]),
        ("trainer.deterministic", [None, True, "warn"], ["error", 1]),
        ("trainer.use_distributed_sampler", [False], [True, None]),
    ],
)
def test_rule(key, right, wrong):
    rule = rule_of(key)
    assert [value for value in right if not rule.holds(value)] == []
    assert [value for value in wrong if rule.holds(value)] == []


def test_every_pattern_is_of_a_key():
    keys = set()
    for overrides in (
        ["data=mnist", "model=mlp", "callbacks=[early_stopping,ema]"],
        ["model=resnet18", "logger=[wandb,mlflow]"],
        ["data=folder", "data.num_classes=2"],
        *([f"cluster={name}"] for name in ("elastic", "runai", "swarm")),
    ):
        keys |= leaves(plain(check(overrides))).keys()
    patterns = [pattern for patterns in RULES for pattern in patterns.split()]
    unused = [p for p in patterns if not any(fnmatchcase(key, p) for key in keys)]
    assert unused == []


def test_the_message_says_value_rule_and_remedy():
    assert fault("model.optimizer.lr=-1") == "model.optimizer.lr=-1: must be a number above 0"
    assert fault("trainer.precision=bf16-mixd") == (
        "trainer.precision=bf16-mixd: must be one of 32-true, bf16-mixed, 16-mixed, 64-true, "
        "bf16-true, 16-true; did you mean trainer.precision=bf16-mixed?"
    )
    assert fault("trainer.limit_val_batches=2.5").endswith(
        "must be null or a whole number at least 0 or a share from 0.0 to 1.0"
    )


def test_names_of_checkpoints():
    line = "callbacks.best.filename=latest"
    assert fault(line).startswith(f"{line}: must be best")


def test_fsdp_needs_gpus():
    assert "on CPUs use trainer.strategy=ddp" in fault("trainer=fsdp", "trainer.accelerator=cpu")
    assert "clips only by value" in fault("trainer=fsdp", "trainer.gradient_clip_val=1.0")
    check(
        ["trainer=fsdp", "trainer.gradient_clip_val=1.0", "trainer.gradient_clip_algorithm=value"]
    )


def test_contradictions():
    assert fault("data.mean=[0,1]", "data.class_names=[a,b,c]").splitlines() == [
        "data.mean=[0, 1]: must have one for each of data.num_channels=1",
        "data.class_names=['a', 'b', 'c']: must have one for each of data.num_classes=10",
    ]
    assert fault("data.num_channels=3").splitlines() == [
        "data.mean=[0.305]: must have one for each of data.num_channels=3",
        "data.std=[0.376]: must have one for each of data.num_channels=3",
    ]


def test_what_only_looks_like_a_contradiction():
    check(["data.class_names=null", "data.num_classes=3"])
