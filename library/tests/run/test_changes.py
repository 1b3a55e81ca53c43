import pytest
import yaml

from library.tests.run.settings import make_spec, save
from samestep import option_names
from samestep.errors import ConfigError
from samestep.run import lifecycle
from samestep.run.changes import find_changes, read_config

pytestmark = pytest.mark.program


@pytest.fixture
def run_dir(tmp_path):
    """A run with one checkpoint."""
    spec = make_spec(tmp_path / "test")
    lifecycle.open_directory(spec, [])
    save(spec.run_dir / "checkpoints/last.ckpt", 1)
    return spec.run_dir


def test_limits_places_and_looks_may_change(run_dir):
    assert find_changes(make_spec(run_dir)) == {}
    changed = {"trainer.max_epochs": 4, "trainer.devices": 2, "logger.wandb._target_": "wandb"}
    assert find_changes(make_spec(run_dir, changed)) == {
        "trainer.max_epochs": (2, 4),
        "trainer.devices": (1, 2),
        "logger.wandb._target_": ("absent", "wandb"),
    }


def test_what_is_learned_may_not_change(run_dir):
    changed = {"seed": 7, "model.width": 85, "trainer.max_epochs": 4}
    with pytest.raises(ConfigError, match="RUN_ID") as error:
        find_changes(make_spec(run_dir, changed))
    message = str(error.value)
    assert "\n  seed: 0 -> 7\n" in message
    assert "\n  model.width: absent -> 85\n" in message
    assert "max_epochs" not in message


def test_allowed_changes_are_accepted_by_name(run_dir):
    changed = {"seed": 7, "model.lr": 0.5}
    allowed = make_spec(run_dir, changed, allow_changes=["seed", "model.lr"])
    assert find_changes(allowed) == {"seed": (0, 7), "model.lr": (0.003, 0.5)}
    words = r'in this run: allow_changes=\["seed", "model.lr"\]'
    with pytest.raises(ConfigError, match=words) as error:
        find_changes(make_spec(run_dir, changed, allow_changes=["seed"]))
    assert "seed: 0" not in str(error.value)
    # On a command line it is quoted as a shell needs it.
    option_names.use({"allow_changes": "allow_changes"}, {})
    try:
        with pytest.raises(ConfigError, match=r"in this run: 'allow_changes=\[seed,model.lr\]'"):
            find_changes(make_spec(run_dir, changed))
    finally:
        option_names.use({}, {})


def test_data_may_lie_elsewhere_and_be_read_by_others(run_dir):
    changed = {"data.root": "/volume", "data.num_workers": 4, "model.compile": True}
    assert {*find_changes(make_spec(run_dir, changed))} == {*changed}
    with pytest.raises(ConfigError, match=r"data\.num_val"):
        find_changes(make_spec(run_dir, {"data.num_val": 100}))


def test_without_a_configuration_its_digest_is_compared(tmp_path):
    spec = make_spec(tmp_path / "test")
    lifecycle.open_directory(spec, [])
    save(spec.run_dir / "checkpoints/last.ckpt", 1)
    (spec.run_dir / "config.yaml").unlink()
    changed = {"trainer.max_epochs": 4, "data.root": "/volume"}
    assert find_changes(make_spec(spec.run_dir, changed)) == {}
    with pytest.raises(ConfigError, match=r"has lost its config.yaml.*RUN_ID"):
        find_changes(make_spec(spec.run_dir, {"seed": 7}))


def test_a_damaged_configuration_must_be_restored(run_dir):
    for content in ("", "[1]", "seed: [", "\x00"):
        (run_dir / "config.yaml").write_text(content)
        with pytest.raises(ConfigError, match=r"config.yaml cannot be read: .*Restore"):
            find_changes(make_spec(run_dir))


def test_harmless_keys_may_be_missing(run_dir):
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    del saved["summary"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(saved))
    assert find_changes(make_spec(run_dir)).keys() == {"summary.next"}


def test_a_text_that_looks_like_a_reference_is_read_as_it_is(tmp_path):
    spec = make_spec(tmp_path / "test", {"data.names": ["${run_id}", "a"]})
    lifecycle.open_directory(spec, [])
    save(spec.run_dir / "checkpoints/last.ckpt", 1)
    assert find_changes(spec) == {}
    assert read_config(spec.run_dir)["data"]["names"][0] == "${run_id}"
