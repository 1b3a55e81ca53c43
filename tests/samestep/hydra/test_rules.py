import pytest
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.compose import check
from samestep.hydra.rules import RULES, find_unprintable
from samestep.hydra.schema import plain
from samestep.spec import leaves


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
        ("trainer.enable_checkpointing", [True], [False, None]),
        ("trainer.fast_dev_run", [True, False, 5], [0, "yes"]),
        ("trainer.val_check_interval", [None, 1, 100, 0.5, 1.0], [0, 0.0, 1.5]),
        ("trainer.gradient_clip_val", [None, 0.5], [0, -1]),
        ("trainer.deterministic", [None, True, "warn"], ["error", 1]),
        ("trainer.use_distributed_sampler", [], [True, False, None]),
    ],
)
def test_rule(key, right, wrong):
    rule = RULES[key]
    assert [value for value in right if not rule.holds(value)] == []
    assert [value for value in wrong if rule.holds(value)] == []


def test_every_rule_is_of_a_key():
    import inspect

    import lightning

    keys = {f"trainer.{name}" for name in inspect.signature(lightning.Trainer).parameters}
    for overrides in (
        ["callbacks=[early_stopping,ema]"],
        *([f"cluster={name}"] for name in ("elastic", "runai", "slurm", "swarm")),
    ):
        keys |= leaves(plain(check(overrides))).keys()
    assert RULES.keys() - keys == set()


def test_the_message_says_value_rule_and_remedy():
    assert fault("cluster.timeout_s=-1") == "cluster.timeout_s=-1: must be a number above 0"
    assert fault("trainer.precision=bf16-mixd") == (
        "trainer.precision=bf16-mixd: must be one of 32-true, bf16-mixed, 16-mixed, 64-true, "
        "bf16-true, 16-true; did you mean trainer.precision=bf16-mixed?"
    )
    assert fault("trainer.limit_val_batches=2.5").endswith(
        "must be null or a whole number at least 0 or a share from 0.0 to 1.0"
    )


def test_the_name_of_the_best_checkpoint_cannot_be_changed():
    assert "no such key" in fault("callbacks.checkpoints.filename=latest")


def test_fsdp_needs_gpus():
    assert "on CPUs use trainer.strategy=ddp" in fault("trainer=fsdp", "trainer.accelerator=cpu")
    assert "clips only by value" in fault("trainer=fsdp", "trainer.gradient_clip_val=1.0")
    check(
        ["trainer=fsdp", "trainer.gradient_clip_val=1.0", "trainer.gradient_clip_algorithm=value"]
    )


def test_rules_are_those_of_the_module_that_the_configuration_names():
    assert fault("rules=no.module").startswith("rules=no.module: No module named 'no'; it must be")
    assert "has no attribute 'RULES'" in fault("rules=json")
    no_rules = ["rules=null", "callbacks.checkpoints.mode=max"]
    assert check([*no_rules, "data.num_channels=0"]).data.num_channels == 0


KEY = "callbacks.checkpoints"


@pytest.mark.parametrize(
    ("overrides", "modes"),
    [
        ([], {"checkpoints": "max"}),
        ([f"{KEY}.monitor=val_loss", f"{KEY}.mode=min"], {"checkpoints": "min"}),
        ([f"{KEY}.monitor=val/f1", f"{KEY}.mode=max"], {"checkpoints": "max"}),
        (["callbacks=early_stopping"], {"checkpoints": "max", "early_stopping": "max"}),
    ],
)
def test_the_mode_follows_the_metric(overrides: list[str], modes: dict[str, str]):
    callbacks = check(overrides).callbacks
    assert {name: callbacks[name].mode for name in callbacks if "mode" in callbacks[name]} == modes


def test_a_mode_that_is_not_right_is_refused():
    assert fault(f"{KEY}.monitor=val/loss") == (
        f"{KEY}.mode=max: but of val/loss less is better; set {KEY}.mode=min"
    )


CLUSTERS = ["slurm", "k8s", "swarm", "docker", "runai", "flyte", "kubeflow", "elastic"]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_text_of_a_cluster_is_more_than_one_line(cluster):
    """In a batch script a shell would execute what comes after the newline."""
    cfg = check([f"cluster={cluster}"])
    for key, value in leaves(plain(cfg)).items():
        group = key.split(".")[0]
        if group not in ("cluster", "run_root", "run_dir") or not isinstance(value, str | None):
            continue
        if key.startswith("cluster.fixed."):  # whose names have dots; nothing is rendered from it
            continue
        for text in ("gpu\ntouch made", "12:00:00\n", "a\rb", "a\x1b[2Jb", "a\u2028b"):
            evil = cfg.copy()
            OmegaConf.update(evil, key, text)
            lines = [*find_unprintable(evil)]
            assert any(line.startswith(f"{key}=") for line in lines), key
            assert all(line.isprintable() for line in lines)


def test_a_block_of_yaml_is_refused_where_a_line_is_needed():
    message = fault("cluster=slurm", "cluster.time='12:00:00\n'")
    assert message == (
        'cluster.time="12:00:00\\n": must be one line without control characters; in a YAML file '
        "write it beside its key, without | or >"
    )
    assert "cluster.options[0]=" in fault("cluster=slurm", "cluster.options=['--qos=a\nrm x']")
    assert "run_root=" in fault("run_root='a\nb'")
    assert "a string" in fault("cluster=slurm", "cluster.partition={a: b}")
