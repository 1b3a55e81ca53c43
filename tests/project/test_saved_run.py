"""Runs read back from their directories."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from project import load_run
from samestep.errors import ConfigError, RunError


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


def test_a_missing_checkpoint_is_named_with_those_that_exist(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "best.ckpt").unlink()
    with pytest.raises(ConfigError, match=r"ckpt=best: .* holds last"):
        load_run(run_dir)


def test_a_damaged_checkpoint_is_refused(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "best.ckpt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="cannot be used"):
        load_run(run_dir)


def change_config(run_dir: Path, **values: object) -> None:
    """Write other values into the configuration of a run, as an attacker would."""
    config = OmegaConf.load(run_dir / "config.yaml")
    for key, value in values.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True, merge=False)
    OmegaConf.save(config, run_dir / "config.yaml")


def test_a_run_that_is_trusted_may_name_anything(run_dir: Path) -> None:
    change_config(run_dir, data={"_target_": "types.SimpleNamespace", "download": True})
    with pytest.raises(ConfigError, match=r"data\._target_=types\.SimpleNamespace: .* --trust"):
        load_run(run_dir)
    assert load_run(run_dir, trust=True)[1].download
