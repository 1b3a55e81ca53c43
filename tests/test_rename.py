"""``scripts/rename.py``, executed in a clone of this repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clone import clone_working_tree, git
from tests.conftest import run

LEFTOVER = (
    r"\b(from|import) project\b|src/project\b|tests/project\b|_target_: project\.|: project\.rules"
    r"|\(docs/copies\.md|project/[a-z_]+\.py"
)
PLACES = (
    "src", "configs", "scripts", "tests", "train.py", "Dockerfile", "Makefile", "README.md",
    "CONTRIBUTING.md", ".github", "docs", "pyproject.toml",
)  # fmt: skip


BINARY = b"\x80from project import \xff"


def rename(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run("scripts/rename.py", *words, cwd=copy, PYTHONPATH=f"{copy / 'src'}:{copy}")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all files of this repository in which the command was typed."""
    root = clone_working_tree(tmp_path_factory.mktemp("rename") / "pets")
    for name in ("class", "samestep", "json", "../pets"):
        refused = rename(root, name)
        assert refused.returncode == 2
        assert f"{name!r} is no name for a package" in refused.stderr
    for name in ("torch", "yaml", "safetensors"):
        refused = rename(root, name)
        assert refused.returncode == 2
        assert f"{name!r} is a library" in refused.stderr
    (root / "notes.txt").write_text("mine")
    assert "uncommitted changes" in rename(root, "pets").stderr
    (root / "notes.txt").unlink()
    assert git(root, "status", "--porcelain") == ""
    # A data set, as somebody may keep it: binary, and without a suffix.
    (root / "pixels").write_bytes(BINARY)
    (root / "link").symlink_to("pixels")
    git(root, "add", "pixels", "link")
    git(root, "commit", "--quiet", "--message=data")
    done = rename(root, "pets")
    assert done.returncode == 0, done.stderr
    return root


def test_no_file_names_the_old_package(copy: Path):
    git(copy, "add", "--all")
    found = subprocess.run(
        ["git", "grep", "-nP", LEFTOVER, "--", *PLACES, ":!library/src/samestep"],
        cwd=copy, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout.splitlines() == []
    assert not (copy / "src/project").exists()
    assert (copy / "pixels").read_bytes() == BINARY


def test_nothing_is_left_of_copier(copy: Path):
    files = git(copy, "ls-files").splitlines()
    assert [name for name in files if "copier" in name or "copies" in name] == []


def test_what_is_kept_does_not_change(copy: Path):
    kept = ("library/src/samestep", "k8s/*.sh", "requirements.lock", "tests/golden")
    assert git(copy, "diff", "HEAD", "--stat", "--", *kept) == ""
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
