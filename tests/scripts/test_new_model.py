import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.new_model import class_name, copy_text, new_model, write

ROOT = Path(__file__).parents[2]
TABLE = {"cnn": "squeeze", "CNN": "Squeeze"}
NAMES = ["c", "a_b_c", "v2", "match", "a_name_of_thirty_characters_ok"]


WRITTEN = [
    "src/project/model/nets/squeeze.py",
    "configs/model/squeeze.yaml",
    "tests/project/model/nets/test_squeeze.py",
]
# Not what a clone made for itself, nor the model that the manual suggests to write.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "local", "squeeze.*", "test_squeeze.*")


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


def test_the_copy_goes_by_the_new_name(squeezed: Path):
    net, config, test = ((squeezed / name).read_text() for name in WRITTEN)
    assert "class Squeeze(nn.Module):" in net
    assert "_target_: project.model.nets.squeeze.Squeeze\n" in config
    assert "from project.model.nets.squeeze import Squeeze\n" in test


def test_the_copy_passes_its_own_test(squeezed: Path):
    done = run(
        squeezed,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/project/model/nets/test_squeeze.py",
    )
    assert done.returncode == 0, done.stdout


def test_the_copy_trains(squeezed: Path):
    overrides = ("model=squeeze", "debug=limit", "trainer.max_epochs=1", "run_id=first")
    done = run(squeezed, "train.py", *overrides)
    assert done.returncode == 0, done.stderr
    assert (squeezed / "runs/first/metrics.json").is_file()
    assert "project.model.nets.squeeze.Squeeze" in (squeezed / "runs/first/config.yaml").read_text()


def test_copies_of_every_model_under_any_name_pass_the_linters(repository: Path):
    before = files(repository)
    for model in ("cnn", "mlp", "resnet18"):
        for name in NAMES:
            new_model(repository, f"{model[0]}{name}"[:30], model, dry_run=False)
    made = [name for name in files(repository) if name not in before and name.endswith(".py")]
    assert len(made) == 2 * 3 * len(NAMES)
    for command in (["check"], ["format", "--check"]):
        done = run(repository, "-m", "ruff", *command, "--no-cache", *made)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_a_copy_is_the_copy(repository: Path, name: str):
    new_model(repository, name, "cnn", dry_run=False)
    new_model(repository, "last", name, dry_run=False)
    twice = files(repository)
    for made in repository.rglob("*last.*"):
        made.unlink()
    new_model(repository, "last", "cnn", dry_run=False)
    once = files(repository)
    assert once["configs/model/last.yaml"] == twice["configs/model/last.yaml"]
    for path in ("src/project/model/nets/last.py", "tests/project/model/nets/test_last.py"):
        assert ast.dump(ast.parse(once[path])) == ast.dump(ast.parse(twice[path]))


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
        ("project", "cnn", "'project' has a meaning in "),
        ("tensor", "cnn", "'Tensor' has a meaning in src/project/model/nets/cnn.py"),
        ("net", "cnn", "'net' has a meaning in "),
    ],
)
def test_what_cannot_be_done_is_refused(untouched: Path, name: str, source: str, message: str):
    before = files(untouched)
    with pytest.raises(ValueError, match=re.escape(message)):
        new_model(untouched, name, source, dry_run=False)
    assert files(untouched) == before


def test_one_file_in_the_way_is_enough_to_write_none(repository: Path):
    (repository / "tests/project/model/nets/test_squeeze.py").write_text("mine = 1\n")
    before = files(repository)
    done = run(repository, "scripts/new_model.py", "squeeze", "--from", "cnn")
    assert done.returncode == 2
    assert "'squeeze' is taken: there is tests/project/model/nets/test_squeeze.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert files(repository) == before


def test_a_dry_run_shows_the_changes_and_writes_nothing_without_torch(untouched: Path):
    before = files(untouched)
    script = ("scripts/new_model.py", "squeeze", "--from", "cnn", "--dry-run")
    done = run(untouched, "-X", "importtime", *script)
    assert done.returncode == 0
    assert (
        "  src/project/model/nets/squeeze.py\n    -class CNN(nn.Module):\n    +class Sq"
        in done.stdout
    )
    assert files(untouched) == before
    assert "yaml" in done.stderr
    assert "torch" not in done.stderr


def test_a_net_from_elsewhere_is_not_copied(repository: Path):
    config = repository / "configs/model/alien.yaml"
    config.write_text("net:\n  _target_: torchvision.models.alexnet\n")
    with pytest.raises(ValueError, match=r"its net is torchvision\.models\.alexnet, without"):
        new_model(repository, "squeeze", "alien", dry_run=False)


def test_python_is_edited_in_tokens_not_words(tmp_path: Path):
    old = tmp_path / "cnn.py"
    old.write_text(
        '"""cnn and CNN in prose."""\n\n'
        "from project.model.nets.cnn import CNN  # a cnn, a CNN\n\n"
        "cnns = CNNS = my_cnn = 1\n"
        'same = ["cnns", "cnn-like", "a cnn", f"cnn{cnns}", "x.cnns", """cnn"""]\n'
        'new = ["cnn", r"cnn", "model=cnn", "project.model.nets.cnn.CNN", "model/cnn.yaml", CNN]\n'
    )
    copied = copy_text(tmp_path, old, tmp_path / "squeeze.py", TABLE)
    assert copied == (
        '"""cnn and CNN in prose."""\n\n'
        "from project.model.nets.squeeze import Squeeze  # a cnn, a CNN\n\n"
        "cnns = CNNS = my_cnn = 1\n"
        'same = ["cnns", "cnn-like", "a cnn", f"cnn{cnns}", "x.cnns", """cnn"""]\n'
        "new = [\n"
        '    "squeeze",\n'
        '    r"squeeze",\n'
        '    "model=squeeze",\n'
        '    "project.model.nets.squeeze.Squeeze",\n'
        '    "model/squeeze.yaml",\n'
        "    Squeeze,\n"
        "]\n"
    )


def test_the_prefix_of_a_string_is_not_a_name(tmp_path: Path):
    old = tmp_path / "r.py"
    old.write_text('both = r, r"r"\n')
    assert copy_text(tmp_path, old, tmp_path / "x.py", {"r": "x"}) == 'both = x, r"x"\n'


def test_yaml_is_edited_in_scalars_not_words(tmp_path: Path):
    old = tmp_path / "cnn.yaml"
    old.write_text("# a cnn\nx: a cnn\ny: cnns # cnn\nz: [cnn, 'cnn', cnn-like, a.cnn.CNN]\n")
    assert copy_text(tmp_path, old, tmp_path / "squeeze.yaml", TABLE) == (
        "# a cnn\nx: a cnn\ny: cnns # cnn\nz: [squeeze, 'squeeze', cnn-like, a.squeeze.Squeeze]\n"
    )


def test_a_failed_write_leaves_nothing_behind_and_nothing_changed(tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FileExistsError):
        write({tmp_path / "new": "new", tmp_path / "mine": "new"})
    with pytest.raises(FileNotFoundError):
        write({tmp_path / "new": "new", tmp_path / "no_such_directory/new": "new"})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "mine")]


@pytest.mark.parametrize(("name", "expected"), [("c", "C"), ("squeeze_net2", "SqueezeNet2")])
def test_the_class_is_named_in_camel_case(name: str, expected: str):
    assert class_name(name) == expected
