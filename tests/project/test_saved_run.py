"""Runs read back from their directories."""

import shutil
from pathlib import Path

import pytest
import torch

from project import load_run
from samestep.errors import ConfigError, RunError
from samestep.run.checkpoint import AtomicCheckpointIO


@pytest.fixture
def run_dir(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the shared run, to damage."""
    return shutil.copytree(digits_run, tmp_path / "digits")


@pytest.mark.parametrize("ckpt", ["best", "last"])
def test_a_run_is_loaded_from_its_directory_alone(digits_run: Path, ckpt: str) -> None:
    model, data = load_run(str(digits_run), ckpt)
    assert not model.training
    assert type(model.net).__name__ == "CNN"
    assert data.class_names == [str(digit) for digit in range(10)]
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_class_that_is_gone_is_named(run_dir: Path) -> None:
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("classifier.ImageClassifier", "gone.Gone"))
    with pytest.raises(ConfigError, match=r"project\.model\.gone\.Gone"):
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
