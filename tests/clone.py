"""A repository of its own with the files of this working tree, for tests that change them."""

import shutil
import subprocess
from pathlib import Path

from tests.conftest import ROOT


def git(folder: Path, *words: str) -> str:
    """What git says there. Its user needs no settings."""
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder: Path, tag: str = "") -> None:
    """Commit all files."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=all")
    if tag:
        git(folder, "tag", tag)


def clone_working_tree(folder: Path, tag: str = "") -> Path:
    """Copy all files, committed or not, but those that git ignores, and commit them there."""
    for name in git(ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    commit(folder, tag)
    return folder
