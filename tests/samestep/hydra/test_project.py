"""Which folder is the project that a command works on."""

import sys
from pathlib import Path

import pytest

from samestep.errors import ConfigError
from samestep.hydra.project import config_folders, configs_folder, find_config, project_folder


def make(project: Path) -> Path:
    (project / "configs").mkdir(parents=True)
    (project / "configs" / "train.yaml").touch()
    return project


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and the current directory two folders below it."""
    project = make(tmp_path / "one")
    below = project / "runs" / "mine"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    monkeypatch.delenv("SAMESTEP_PROJECT", raising=False)
    monkeypatch.setattr(sys, "argv", ["samestep"])
    return project


def test_a_command_finds_the_project_above_the_current_directory(one: Path):
    assert project_folder() == one
    assert configs_folder() == one / "configs"


@pytest.mark.parametrize("script", ["train.py", "scripts/try.py", "src/project/train.py"])
def test_a_script_uses_the_project_it_lies_in(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
):
    other = make(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", [str(other / script)])
    assert project_folder() == other


def test_the_command_of_another_environment_uses_this_project(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = make(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", [str(other / ".venv/bin/samestep")])
    assert project_folder() == one


def test_a_named_project_comes_first(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = make(tmp_path / "other")
    monkeypatch.setenv("SAMESTEP_PROJECT", str(other))
    monkeypatch.setattr(sys, "argv", [str(one / "train.py")])
    assert project_folder() == other


def test_without_a_project_the_message_says_where_it_looked(
    tmp_path: Path, one: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SAMESTEP_PROJECT", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"SAMESTEP_PROJECT={tmp_path}: there is no configs/"):
        project_folder()
    monkeypatch.delenv("SAMESTEP_PROJECT")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{tmp_path}: there is no configs/train.yaml here"):
        project_folder()


def test_the_search_path_is_relative_to_the_project(one: Path):
    text = "hydra: {searchpath: ['file://examples/text/configs', file://gone]}"
    (one / "configs/train.yaml").write_text(text)
    file = one / "examples/text/configs/model/transformer.yaml"
    file.parent.mkdir(parents=True)
    file.touch()
    assert config_folders() == [one / "configs", one / "examples/text/configs"]
    assert find_config("model", "transformer") == file
    assert find_config("model", "cnn") is None
