"""Runs read back from their directories, also those of older versions."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from project import load_run
from project.saved_run import MOVED, drop_unknown_arguments, new_place, read_saved_config
from samestep.errors import ConfigError, RunError
from samestep.run.checkpoint import AtomicCheckpointIO
from tests.conftest import run

# Trained by the version before there were two packages (d6c206e), with
# python train.py model=mlp model.net.hidden_size=8 trainer.max_epochs=2 run_id=old
OLD_RUN = Path(__file__).with_name("old_run")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A copy of the old run, to damage."""
    return shutil.copytree(OLD_RUN, tmp_path / "old")


@pytest.mark.parametrize("ckpt", ["best", "last"])
def test_an_old_run_is_loaded_from_its_directory_alone(ckpt: str) -> None:
    model, data = load_run(str(OLD_RUN), ckpt)
    assert not model.training
    assert type(model.net).__name__ == "MLP"
    assert data.class_names == [str(digit) for digit in range(10)]
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_an_old_run_has_the_metrics_that_it_had() -> None:
    result = run("scripts/evaluate.py", str(OLD_RUN), "--format", "json")
    assert (result.returncode, result.stderr) == (0, "")
    saved = json.loads((OLD_RUN / "metrics.json").read_text())
    expected = {name: value for name, value in saved.items() if name.startswith("test/")}
    assert json.loads(result.stdout) == pytest.approx(expected, rel=1e-5)


def test_an_old_run_can_be_exported_under_the_new_names(run_dir: Path) -> None:
    result = run("scripts/export.py", str(run_dir))
    assert (result.returncode, result.stderr) == (0, "")
    config = OmegaConf.load(run_dir / "export" / "config.yaml")
    assert config.net._target_ == "project.model.nets.mlp.MLP"


def test_every_old_place_in_a_configuration_becomes_a_new_one() -> None:
    assert "project.nets.mlp.MLP" in (OLD_RUN / "config.yaml").read_text()
    text = OmegaConf.to_yaml(read_saved_config(OLD_RUN))
    for old in MOVED:
        assert f"_target_: {old}." not in text
    assert "_target_: project.data.sources.Digits" in text
    assert "_target_: samestep.callbacks.last_checkpoint.LastCheckpoint" in text


def test_only_whole_names_are_old_places() -> None:
    assert new_place("project.nets.mine.Net") == "project.model.nets.mine.Net"
    for present in ("project.nets_of_mine.Net", "project.data.datamodule.ImageDataModule", "torch"):
        assert new_place(present) == present


def test_arguments_that_a_class_no_longer_takes_are_left_out() -> None:
    node = OmegaConf.create({"_target_": "torch.nn.Linear", "in_features": 1, "gone": 2})
    assert drop_unknown_arguments(node) == {"_target_": "torch.nn.Linear", "in_features": 1}
    for takes_any in ("builtins.dict", "tests.conftest.environment"):
        node = OmegaConf.create({"_target_": takes_any, "mine": 1})
        assert drop_unknown_arguments(node) == node


def test_a_class_that_is_gone_is_named(run_dir: Path) -> None:
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("classifier.ImageClassifier", "gone.Gone"))
    with pytest.raises(ConfigError, match=r"project\.gone\.Gone"):
        load_run(run_dir)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_run(tmp_path)


@pytest.mark.parametrize("config", ["a: 1", "model: 3\ndata: null", "model: {_target_: x}"])
def test_a_damaged_configuration_is_refused(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged: .* must be a group of keys"):
        load_run(tmp_path)


def test_a_missing_checkpoint_is_named_with_those_that_exist(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "best.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"ckpt=best: .* holds last"):
        load_run(run_dir)


def test_a_damaged_checkpoint_is_refused(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "best.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="is refused"):
        load_run(run_dir)


@pytest.mark.parametrize(
    "content",
    [
        {},
        torch.zeros(3),
        {"state_dict": None},
        {"state_dict": {}},
        {"state_dict": {"net.layers.1.weight": torch.zeros(2)}},
    ],
    ids=["empty", "tensor", "none", "no weights", "other shapes"],
)
def test_a_checkpoint_of_something_else_is_one_message(run_dir: Path, content: object) -> None:
    path = run_dir / "checkpoints" / "best.ckpt"
    torch.save(content, path)
    if isinstance(content, dict):
        AtomicCheckpointIO().save_checkpoint(content, path)
    with pytest.raises(RunError) as caught:
        load_run(run_dir)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)
