"""The commands of docs/code.md that rename ``project``, executed in a copy of this repository."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, run

PAGE = (ROOT / "docs" / "code.md").read_text()
SECTION = PAGE.partition("## Another name for the package")[2]
COMMANDS = "\n".join(line[4:] for line in SECTION.splitlines() if line.startswith("    "))
LEFTOVER = (
    r"\b(from|import) project\b|src/project\b|tests/project\b|_target_: project\.|: project\.rules"
)
PLACES = (
    "src",
    "configs",
    "scripts",
    "tests",
    "train.py",
    "Dockerfile",
    ".github",
    "docs",
    "pyproject.toml",
)


def git(copy: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *words]
    return subprocess.run(command, cwd=copy, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all files of this repository in which the commands have been executed."""
    root = tmp_path_factory.mktemp("rename") / "pets"
    kept = ["ls-files", "--cached", "--others", "--exclude-standard"]
    for name in git(ROOT, *kept).splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message=copy")
    subprocess.run(["bash", "-ec", COMMANDS], cwd=root, check=True)
    return root


def test_no_file_names_the_old_package(copy: Path):
    git(copy, "add", "--all")
    found = subprocess.run(
        ["git", "grep", "-nP", LEFTOVER, "--", *PLACES, ":!src/samestep"],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout == ""
    assert not (copy / "src/project").exists()


def test_what_is_kept_does_not_change(copy: Path):
    assert (
        git(copy, "diff", "HEAD", "--stat", "--", "src/samestep", "k8s", "requirements.lock") == ""
    )
    assert 'name = "project"' in (copy / "pyproject.toml").read_text()


def test_the_copy_passes_the_linter_after_formatting(copy: Path):
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--fix", "--quiet"], cwd=copy, check=True)
    subprocess.run([*ruff, "format", "--quiet"], cwd=copy, check=True)
    subprocess.run([*ruff, "check", "--quiet"], cwd=copy, check=True)


def test_the_copy_trains(copy: Path):
    path = f"{copy / 'src'}:{copy}"
    result = run("train.py", "debug=limit", "run_id=mine", cwd=copy, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert "Finished: runs/mine" in result.stdout
    saved = (copy / "runs/mine/config.yaml").read_text()
    assert re.search(r"_target_: pets\.model\.classifier\.ImageClassifier", saved)
    assert "project.model" not in saved
