"""Copies of models and data sets under a new name."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.command_line import call
from samestep.errors import ConfigError
from scripts import new
from scripts.new import copy
from tests.conftest import ROOT, run

WRITTEN = ["configs/model/squeeze.yaml", "src/project/nets/squeeze.py"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name in ("configs", "examples", "library", "scripts", "src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "local")
        shutil.copytree(ROOT / name, root / name, ignore=ignored)
    for name in ("pyproject.toml", "train.py"):
        shutil.copy(ROOT / name, root)
    return root


def files(root: Path) -> dict[str, str]:
    paths = (path for suffix in ("py", "yaml") for path in root.rglob(f"*.{suffix}"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def in_copy(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return run(*command, cwd=root, PYTHONPATH=f"{root}:{root / 'src'}")


@pytest.mark.program
def test_a_copied_model_trains(repository: Path):
    before = files(repository)
    done = in_copy(repository, "scripts/new.py", "model", "squeeze", "--from", "cnn")
    assert done.returncode == 0, done.stderr
    assert "python train.py model=squeeze" in done.stdout
    after = files(repository)
    assert after.keys() - before.keys() == set(WRITTEN)
    assert all(after[name] == before[name] for name in before)
    config, net = (after[name] for name in WRITTEN)
    assert "class Squeeze(nn.Sequential):" in net
    assert "_target_: project.nets.squeeze.Squeeze\n" in config

    done = in_copy(repository, "train.py", "model=squeeze", "debug=limit", "run_id=first")
    assert done.returncode == 0, done.stderr


@pytest.mark.program
def test_a_copied_data_set_says_what_to_fill_in(repository: Path):
    done = in_copy(repository, "scripts/new.py", "data", "birds", "--from", "folder")
    assert done.returncode == 0, done.stderr
    assert "python train.py data=birds data.root=... data.num_classes=..." in done.stdout
    found = files(repository)
    assert found["configs/data/birds.yaml"] == found["configs/data/folder.yaml"]


@pytest.mark.program
def test_copies_of_every_model_pass_the_linters(repository: Path):
    made = []
    for model in ("cnn", "mlp", "resnet18"):
        for name in ("cc", "a_name_of_thirty_characters_ok"):
            new = f"{model[0]}{name}"[:30]
            made += copy(repository, "model", new, model)[1:]
    python = [str(path) for path in made]
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "format", "--quiet", *python], check=True)
    done = subprocess.run([*ruff, "check", "--no-cache", *python], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("group", "name", "source", "message"),
    [
        ("model", "cnn", "mlp", "'cnn' is taken: there is configs/model/cnn.yaml"),
        ("data", "birds2", "foldr", " cifar10, "),
        ("model", "new", "../model/cnn", "no model '../model/cnn'"),
        ("model", "new", "default", " cnn, "),
        ("model", "../new", "cnn", "use lower-case letters"),
        ("model", "class", "cnn", "not a name"),
        ("model", "tensor", "resnet18", "'Tensor' already occurs in the files"),
        ("model", "new", "alien", "alien.yaml names no net of this project"),
    ],
)
def test_what_cannot_be_done_is_refused(
    repository: Path, group: str, name: str, source: str, message: str
):
    alien = repository / "configs/model/alien.yaml"
    alien.write_text("net:\n  _target_: torchvision.models.alexnet\n")
    before = files(repository)
    with pytest.raises(ConfigError, match=re.escape(message)):
        copy(repository, group, name, source)
    assert files(repository) == before


def test_a_full_disk_is_one_message_and_leaves_nothing(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write = Path.write_text

    def write_or_fail(path: Path, *arguments: str) -> int:
        if path.name == "late.py":
            raise OSError(28, "No space left on device", str(path))
        return write(path, *arguments)

    before = files(repository)
    monkeypatch.setattr(Path, "write_text", write_or_fail)
    monkeypatch.setattr(new, "ROOT", repository)
    assert call(lambda: new.main(["model", "late", "--from", "cnn"])) == 1
    assert "late.py: No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert files(repository) == before
