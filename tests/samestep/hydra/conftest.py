import shutil

import pytest

from tests.conftest import CONFIGS


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """A copy of configs/ to write experiments into."""
    monkeypatch.setenv("SAMESTEP_PROJECT", str(tmp_path))
    shutil.copytree(CONFIGS, tmp_path / "configs")
    return tmp_path / "configs"


def write(configs, name, *lines):
    path = configs / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["# @package _global_", *lines, ""]))
