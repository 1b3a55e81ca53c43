import pytest

from samestep.keys import Nature, nature_of


@pytest.mark.parametrize(
    ("nature", "keys"),
    [
        (
            Nature.LEARNED,
            ["seed", "model.lr", "trainer.precision", "callbacks.checkpoints.monitor"],
        ),
        (Nature.LEARNED, ["model.trainer.devices", "trainer.max_epochs_too", "data.cluster"]),
        (Nature.LIMIT, ["trainer.max_time", "trainer.strategy._target_", "callbacks.a.patience"]),
        (Nature.PLACE, ["cluster", "cluster.timeout_s", "trainer.devices", "callbacks.x.every_s"]),
        (Nature.LOOKS, ["run_dir", "callbacks.a.dirpath", "choices.data", "logger.wandb.name"]),
        (Nature.LOOKS, ["callbacks.artifacts.run_dir"]),  # it is a PLACE by another pattern
    ],
)
def test_each_key_has_one_nature(nature: Nature, keys: list[str]):
    assert {nature_of(key) for key in keys} == {nature}


def test_keys_of_the_user_may_differ_from_node_to_node():
    assert nature_of("data.root", ["data\\.(root|mirror)"]) is Nature.PLACE
    assert nature_of("data.rooted", ["data\\.(root|mirror)"]) is Nature.LEARNED
    assert nature_of("trainer.max_epochs", ["trainer\\..*"]) is Nature.LIMIT
