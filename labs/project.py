"""A copy of the template for a laboratory, in which it may write configurations and run."""

import shutil
from pathlib import Path

from tests.conftest import ROOT


def copy_project(folder: Path) -> None:
    """Make a project in ``folder``; its code is that of this tree."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "train.py", folder)
    (folder / "src").symlink_to(ROOT / "src")
