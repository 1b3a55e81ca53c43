"""Copies of the template, made and updated by Copier itself."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, environment, run

NOT_SEARCHED = (
    # What is kept whole, as an installed library and its tests are.
    "src/samestep/", "tests/", "requirements", ".copier-answers.yml",
    # They also log to trackers, if there is one.
    "src/project/predictions.py", "src/project/language/predictions.py",
)  # fmt: skip
WORDS = {  # what a copy without it must not say, outside of the kept part
    "images": r"handwritten|=digits|digits[_-]|cifar|mnist|resnet|\bcnn\b|ImageClassifier|photo",
    "language": r"transformer|topics|experiment=language|project\.language",
    "kubernetes": r"kubernetes|kubectl|jobset|pytorchjob|cluster=k8s",
    "slurm": r"slurm|sbatch",
    "docker": r"swarm|cluster=docker",
    "runai": r"run:ai|runai",
    "flyte": r"flyte",
    "wandb": r"wandb|w&b",
    "mlflow": r"mlflow",
    "tensorboard": r"tensorboard",
}
KEPT_LINES = r"ignore_missing_imports|^module = |[Ss]lurm|srun"  # of pyproject.toml, for samestep
NAMES = {"user.name": "test", "user.email": "test@localhost"}


def git(folder: Path, *words: str) -> str:
    options = [word for name, value in NAMES.items() for word in ("-c", f"{name}={value}")]
    command = ["git", *options, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path, tag: str = "") -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=all")
    if tag:
        git(folder, "tag", tag)


def copier(*words: str | Path) -> None:
    command = [sys.executable, "-m", "copier", *words, "--defaults", "--quiet"]
    variables = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "test"), ("EMAIL", "test@localhost"))
    }
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def make_copy(template: Path, to: Path, **answers: list[str]) -> Path:
    """A committed copy with these tasks, clusters and loggers."""
    words = [f"--data={key}={yaml.safe_dump(value, default_flow_style=True).strip()}"
             for key, value in answers.items()]  # fmt: skip
    data = ["--data=name=bird-songs", '--data=author=Ada "Countess" Lovelace', *words]
    copier("copy", *data, template, to)
    git(to, "init", "--quiet")
    commit(to)
    return to


def train(copy: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = f"{copy / 'src'}:{copy}"
    return run("train.py", "debug=fast", *overrides, cwd=copy, PYTHONPATH=path)


def check(copy: Path, *tests: str) -> None:
    """Run the linters, and some tests, within the copy."""
    env = environment(PYTHONPATH=f"{copy / 'src'}:{copy}")
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy", cache],
                    ["pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=copy, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This working tree, as the first version of a template."""
    root = tmp_path_factory.mktemp("versions") / "template"
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet")
    commit(root, "v1.0.0")
    return root


def spoken(copy: Path, *left_out: str) -> list[str]:
    """Lines of the copy that speak of what it left out."""
    found, words = [], "|".join(WORDS[choice] for choice in left_out)
    for name in git(copy, "ls-files").splitlines():
        if name.startswith(NOT_SEARCHED) or name.endswith((".xz", ".png", ".svg")):
            continue
        for line in (copy / name).read_text().splitlines():
            is_kept = name == "pyproject.toml" and re.search(KEPT_LINES, line)
            if not is_kept and re.search(words, line, re.I):
                found.append(f"{name}: {line}")
            assert "copier:" not in line, name
    return found


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, old
    path.write_text(text.replace(old, new))


def test_a_copy_is_changed_and_updated(template: Path, tmp_path: Path):
    choices = {"tasks": ["images"], "clusters": ["slurm"], "loggers": ["tensorboard"]}
    copy = make_copy(template, tmp_path / "my project", **choices)
    left_out = WORDS.keys() - {"images", "slurm", "tensorboard"}
    assert spoken(copy, *left_out) == []
    project = tomllib.loads((copy / "pyproject.toml").read_text())["project"]
    assert project["name"] == "bird-songs"
    assert project["authors"] == [{"name": 'Ada "Countess" Lovelace'}]
    assert not {"wandb>=0.31"} & {*project["dependencies"]}
    assert 'image.title="bird-songs"' in (copy / "Dockerfile").read_text()
    assert "example.com/bird-songs:" in (copy / "configs/cluster/common.yaml").read_text()
    assert (copy / "README.md").read_text().startswith("# bird-songs\n")
    check(copy, "tests/test_layout.py", "tests/test_docs.py", "tests/project/test_rules.py")

    # The user changes what is theirs.
    net, data = copy / "src/project/model/nets/cnn.py", copy / "configs/data/digits.yaml"
    replace(copy / "README.md", "# bird-songs\n", "# Songs of birds\n")
    replace(data, "global_batch_size: 32", "global_batch_size: 64")
    replace(copy / "configs/trainer/default.yaml", "max_epochs: 20", "max_epochs: 7")
    net.write_text(net.read_text() + "\n\nMINE = 1\n")
    commit(copy)
    mine = net.read_text()

    # A new version of the template. One of its changes is where the user has changed a line.
    errors = template / "src/samestep/errors.py"
    errors.write_text(errors.read_text() + "\n\nVERSION = 2\n")
    replace(template / "configs/data/digits.yaml", "real data that needs", "real data which needs")
    replace(template / "configs/trainer/default.yaml", "max_epochs: 20", "max_epochs: 30")
    with (template / "Makefile").open("a") as file:
        file.write("\n# The second version.\n")
    commit(template, "v2.0.0")
    copier("update", copy)

    assert net.read_text() == mine
    assert (copy / "README.md").read_text().startswith("# Songs of birds\n")
    assert (copy / "src/samestep/errors.py").read_text() == errors.read_text()
    assert "The second version" in (copy / "Makefile").read_text()
    assert "global_batch_size: 64" in data.read_text()
    assert "real data which needs" in data.read_text()
    assert "_commit: v2.0.0" in (copy / ".copier-answers.yml").read_text()
    conflict = (copy / "configs/trainer/default.yaml").read_text()
    assert "<<<<<<< before updating\nmax_epochs: 7" in conflict
    assert "UU configs/trainer/default.yaml" in git(copy, "status", "--porcelain")

    git(copy, "checkout", "--ours", "configs/trainer/default.yaml")
    commit(copy)
    check(copy, "tests/test_layout.py")
    done = train(copy)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("tasks", "data"),
    [([], "skeleton"), (["language"], "topics"), (["images", "language"], "digits")],
    ids=str,
)
def test_a_copy_with_any_tasks_trains(template: Path, tmp_path: Path, tasks, data):
    kept = {"tasks": tasks, "clusters": ["docker"] if tasks else [], "loggers": []}
    copy = make_copy(template, tmp_path / "copy", **kept)
    assert spoken(copy, *WORDS.keys() - {*tasks, *kept["clusters"]}) == []
    assert (copy / "src/project/skeleton.py").exists() == (not tasks)
    small = ["model.net.num_layers=1"] if data == "topics" else []
    done = train(copy, *small, "run_id=first")
    assert done.returncode == 0, done.stderr
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=copy, check=False)
        assert done.returncode == 0
