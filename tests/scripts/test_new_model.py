"""Copies of models under a new name."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.new_model import class_name, new_model, rename
from tests.conftest import ROOT

NAMES = ["cc", "a_b_c", "v2", "match", "a_name_of_thirty_characters_ok"]
WRITTEN = [
    "src/project/model/nets/squeeze.py",
    "configs/model/squeeze.yaml",
    "tests/project/model/nets/test_squeeze.py",
]


def copy_repository(to: Path) -> Path:
    for name in ("configs", "scripts", "src", "tests"):
        shutil.copytree(
            ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "local")
        )
    for name in ("pyproject.toml", "train.py"):
        shutil.copy(ROOT / name, to)
    return to


def run(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RUN_ID", "PYTHONPATH")}
    env["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=env, capture_output=True, text=True
    )


def files(root: Path) -> dict[str, str]:
    paths = (path for suffix in ("py", "yaml") for path in root.rglob(f"*.{suffix}"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return copy_repository(tmp_path)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository for tests in which nothing may be written."""
    return copy_repository(tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="module")
def squeezed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which the command of the manual was typed: nothing else changed."""
    root = copy_repository(tmp_path_factory.mktemp("squeezed"))
    before = files(root)
    done = run(root, "scripts/new_model.py", "squeeze", "--from", "cnn")
    assert done.returncode == 0, done.stderr
    assert "python train.py model=squeeze" in done.stdout
    after = files(root)
    assert after.keys() - before.keys() == set(WRITTEN)
    assert all(after[name] == before[name] for name in before)
    return root


def test_the_copy_goes_by_the_new_name(squeezed: Path) -> None:
    net, config, test = ((squeezed / name).read_text() for name in WRITTEN)
    assert "class Squeeze(nn.Module):" in net
    assert "_target_: project.model.nets.squeeze.Squeeze\n" in config
    assert "from project.model.nets.squeeze import Squeeze\n" in test


def test_the_copy_trains(squeezed: Path) -> None:
    overrides = ("model=squeeze", "debug=limit", "trainer.max_epochs=1", "run_id=first")
    done = run(squeezed, "train.py", *overrides)
    assert done.returncode == 0, done.stderr
    assert (squeezed / "runs/first/metrics.json").is_file()
    assert "project.model.nets.squeeze.Squeeze" in (squeezed / "runs/first/config.yaml").read_text()


def test_a_copy_of_each_model_passes_its_own_test(repository: Path) -> None:
    for model in ("cnn", "mlp", "resnet18"):
        new_model(repository, f"my_{model}", model, dry_run=False)
    made = [str(path) for path in (repository / "tests/project/model/nets").glob("test_my_*.py")]
    assert len(made) == 3
    done = run(repository, "-m", "pytest", "-p", "no:cacheprovider", *made)
    assert done.returncode == 0, done.stdout
    assert "15 passed" in done.stdout


def test_copies_of_every_model_under_any_name_pass_the_linters(repository: Path) -> None:
    before = files(repository)
    for model in ("cnn", "mlp", "resnet18"):
        for name in NAMES:
            new_model(repository, f"{model[0]}{name}"[:30], model, dry_run=False)
    made = [name for name in files(repository) if name not in before and name.endswith(".py")]
    assert len(made) == 2 * 3 * len(NAMES)
    for command in (["check"], ["format", "--check"]):
        done = run(repository, "-m", "ruff", *command, "--no-cache", *made)
        assert done.returncode == 0, done.stdout


def test_a_copy_of_a_copy_is_the_copy(repository: Path) -> None:
    new_model(repository, "squeeze", "cnn", dry_run=False)
    new_model(repository, "twice", "squeeze", dry_run=False)
    new_model(repository, "once", "cnn", dry_run=False)
    found = files(repository)
    for path in WRITTEN:
        twice = found[path.replace("squeeze", "twice")]
        assert found[path.replace("squeeze", "once")] == rename(
            twice, {"twice": "once", "Twice": "Once"}, path
        )


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("cnn", "mlp", "'cnn' is taken: there is src/project/model/nets/cnn.py"),
        ("default", "cnn", "is taken: there is configs/model/default.yaml"),
        ("optimizer", "cnn", "is taken: there is configs/model/optimizer"),
        ("squeeze", "cn", "did you mean 'cnn'?"),
        ("squeeze", "default", "there are cnn, "),
        ("squeeze", "../model/cnn", "no model '../model/cnn'"),
        ("Squeeze", "cnn", "use lower-case letters"),
        ("squeeze-net", "cnn", "use lower-case letters"),
        ("../squeeze", "cnn", "use lower-case letters"),
        ("a" * 31, "cnn", "at most 30 characters"),
        ("", "cnn", "is no name for a model"),
        ("class", "cnn", "give it a meaning"),
        ("none", "cnn", "give it a meaning"),
        ("null", "cnn", "give it a meaning"),
        ("project", "cnn", "'project' stands in "),
        ("tensor", "cnn", "'Tensor' stands in src/project/model/nets/cnn.py"),
        ("net", "cnn", "'net' stands in "),
    ],
)
def test_what_cannot_be_done_is_refused(
    untouched: Path, name: str, source: str, message: str
) -> None:
    before = files(untouched)
    with pytest.raises(ValueError, match=re.escape(message)):
        new_model(untouched, name, source, dry_run=False)
    assert files(untouched) == before


def test_one_file_in_the_way_is_enough_to_write_none(repository: Path) -> None:
    (repository / "tests/project/model/nets/test_squeeze.py").write_text("mine = 1\n")
    before = files(repository)
    done = run(repository, "scripts/new_model.py", "squeeze", "--from", "cnn")
    assert done.returncode == 2
    assert "'squeeze' is taken: there is tests/project/model/nets/test_squeeze.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert files(repository) == before


def test_a_dry_run_shows_the_changes_and_writes_nothing_without_torch(untouched: Path) -> None:
    before = files(untouched)
    script = ("scripts/new_model.py", "squeeze", "--from", "cnn", "--dry-run")
    done = run(untouched, "-X", "importtime", *script)
    assert done.returncode == 0
    net = "  src/project/model/nets/squeeze.py\n    -class CNN(nn.Module):\n    +class Squeeze"
    assert net in done.stdout
    assert files(untouched) == before
    assert "yaml" in done.stderr
    assert "torch" not in done.stderr


def test_a_net_from_elsewhere_is_not_copied(repository: Path) -> None:
    config = repository / "configs/model/alien.yaml"
    config.write_text("net:\n  _target_: torchvision.models.alexnet\n")
    with pytest.raises(ValueError, match=r"its net is torchvision\.models\.alexnet, without"):
        new_model(repository, "squeeze", "alien", dry_run=False)


def test_only_whole_words_are_replaced() -> None:
    before = "from a.cnn import CNN, CNNS\nmodel=cnn my_cnn cnns cnn2 'x.cnn.CNN'\n"
    after = "from a.new import New, CNNS\nmodel=new my_cnn cnns cnn2 'x.new.New'\n"
    assert rename(before, {"cnn": "new", "CNN": "New"}, "a file") == after


@pytest.mark.parametrize(("name", "expected"), [("c", "C"), ("squeeze_net2", "SqueezeNet2")])
def test_the_class_is_named_in_camel_case(name: str, expected: str) -> None:
    assert class_name(name) == expected
