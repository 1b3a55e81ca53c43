import pytest

from samestep.config_keys import KeyScope, scope_of

EXPERIMENT, LIMIT, PER_NODE, COSMETIC = KeyScope


@pytest.mark.parametrize(
    ("scope", "keys"),
    [
        (
            EXPERIMENT,
            ["seed", "model.lr", "trainer.precision", "callbacks.checkpoints.monitor"],
        ),
        (EXPERIMENT, ["model.trainer.devices", "trainer.max_epochs_too", "data.cluster"]),
        (LIMIT, ["trainer.max_time", "trainer.strategy._target_", "callbacks.a.patience"]),
        (
            PER_NODE,
            ["cluster", "cluster.timeout_s", "trainer.devices", "callbacks.x.every_s"],
        ),
        (PER_NODE, ["data.root", "data.num_workers", "data.storage_options.region"]),
        (EXPERIMENT, ["data.rooted", "data.num_val"]),
        (
            PER_NODE,
            ["model.compile"],
        ),
        (
            COSMETIC,
            ["run_dir", "callbacks.a.dirpath", "choices.data", "logger.wandb.name"],
        ),
        (COSMETIC, ["callbacks.artifacts.run_dir"]),  # another pattern makes it PER_NODE
    ],
)
def test_each_key_has_one_scope(scope: KeyScope, keys: list[str]):
    assert {scope_of(key) for key in keys} == {scope}
