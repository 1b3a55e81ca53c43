import pytest
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.rules import RULES
from samestep.run_spec import leaves


def fault(*overrides):
    with pytest.raises(ConfigError) as error:
        check(overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("seed", [0, 2**32 - 1], [-1, 2**32, 1.0, True, "1", None]),
        ("run_id", [None, "a", "0.b_c-D", "x" * 63], ["", ".a", "a/b", "a b", "x" * 64, 5, "é"]),
        ("run_root", ["runs", "/big/runs"], ["", " ", None, 3]),
        ("callbacks.ema.decay", [0.99], [0, 1]),
        ("cluster.timeout_s", [300, 0.5], [0, -1]),
        ("trainer.accelerator", ["auto", "cpu"], ["cuda0", None]),
        ("trainer.devices", [1, 8, "auto"], [0, -1, "1", True, [0, 1]]),
        ("trainer.precision", ["32-true", "bf16-mixed"], ["bf16", 32]),
        ("trainer.max_epochs", [1, -1], [0, -2, 1.0, -1.0]),
        ("callbacks.checkpoints.every_n_epochs", [None, 1, 2], [0, -1, 1.5, True, "2"]),
        ("trainer.limit_val_batches", [None, 0, 3, 0.5, 1.0], [1.5, -1, "3"]),
        ("trainer.limit_train_batches", [None, 1, 3, 0.5, 1.0], [0, 0.0, 1.5, -1, "3"]),
        ("trainer.max_time", [None, "00:12:00:00"], ["abc", 5, "1:2"]),
        ("trainer.overfit_batches", [], [0.0, 1, 0.5]),
        ("trainer.enable_checkpointing", [], [True, False, None]),
        ("trainer.fast_dev_run", [True, False, 5], [0, "yes"]),
        ("trainer.val_check_interval", [None, 1, 100, 0.5, 1.0], [0, 0.0, 1.5]),
        ("trainer.gradient_clip_val", [None, 0.5], [0, -1]),
        ("trainer.deterministic", [None, True, "warn"], ["error", 1]),
        ("trainer.use_distributed_sampler", [], [True, False, None]),
        ("cluster.memory", ["16Gi", "1.5m", "2gb", "3E", 1024, None], ["16 GB", "lots", ""]),
        ("cluster.shm", ["2g", 2147483648], ["16 GB", None]),
    ],
)
def test_rule(key, right, wrong):
    rule = RULES[key]
    assert [value for value in right if not rule.holds(value)] == []
    assert [value for value in wrong if rule.holds(value)] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["+model.net.width=0.75"],
        ["model.net._target_=mine.Net", "+model.net.width=0.75", "model.net.channels=3"],
        ["model/optimizer=sgd", "model.optimizer.momentum=1.0"],
        ["model.optimizer._target_=mine.Sgd", "model.optimizer.lr=0", "~model.optimizer.fused"],
        ["+callbacks.mine={_target_: mine.Callback, mode: fast, patience: -1, decay: 3}"],
        ["callbacks.progress._target_=mine.Progress", "callbacks.progress.log_every_s=0"],
    ],
    ids=" ".join,
)
def test_no_rule_is_about_the_users_own_nets_optimizers_and_callbacks(overrides):
    check(overrides)


def test_every_rule_is_of_a_key():
    import inspect

    import lightning

    keys = {f"trainer.{name}" for name in inspect.signature(lightning.Trainer).parameters}
    for overrides in (
        ["callbacks=[early_stopping,ema]"],
        *([f"cluster={name}"] for name in ("elastic", "runai", "slurm", "swarm")),
    ):
        keys |= leaves(OmegaConf.to_container(check(overrides))).keys()
    assert RULES.keys() - keys == {"trainer.split_batches", "trainer.allow"}  # ours


def test_the_message_says_value_rule_and_remedy():
    assert fault("cluster.timeout_s=-1") == "cluster.timeout_s=-1: must be a number above 0"
    assert fault("trainer.precision=bf16-mixd") == (
        "trainer.precision=bf16-mixd: must be one of 32-true, bf16-mixed, 16-mixed, 64-true, "
        "bf16-true, 16-true; did you mean trainer.precision=bf16-mixed?"
    )
    assert fault("trainer.limit_val_batches=2.5").endswith(
        "must be null or a whole number at least 0 or a fraction from 0.0 to 1.0"
    )


@pytest.mark.parametrize("typed", ["0", "[1,3]"])
def test_the_message_about_devices_names_only_what_is_valid(typed: str):
    message = fault(f"trainer.devices={typed}").partition(": ")[2]
    expected = "must be auto or a whole number at least 1 (CUDA_VISIBLE_DEVICES=1,3 chooses GPUs)"
    assert message == expected


def test_the_name_of_the_best_checkpoint_cannot_be_changed():
    assert "no such key" in fault("callbacks.checkpoints.filename=latest")


def test_a_mode_that_may_be_right_is_accepted():
    check(["callbacks.checkpoints.monitor=val/loss", "callbacks.checkpoints.mode=min"])
    check(["callbacks.checkpoints.monitor=val/glossy"])


def test_the_largest_loss_or_error_is_never_the_best():
    line = "callbacks.{0}.mode=max: a lower callbacks.{0}.monitor={1} is better; set callbacks.{0}."
    typed = ["callbacks.checkpoints.monitor=val_error_rate"]
    assert fault(*typed) == line.format("checkpoints", "val_error_rate") + "mode=min"
    typed = ["callbacks=early_stopping", "callbacks.early_stopping.monitor=val/loss"]
    assert fault(*typed) == line.format("early_stopping", "val/loss") + "mode=min"
