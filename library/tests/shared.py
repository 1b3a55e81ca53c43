"""What is made once for the whole session, over all processes of pytest-xdist."""

from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def session_folder(factory: pytest.TempPathFactory, config: pytest.Config) -> Path:
    """A folder for the whole session."""
    root = factory.getbasetemp()
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        root = root.parent
    root /= "shared"
    root.mkdir(exist_ok=True)
    return root


def make_once(folder: Path, make: Callable[[], None]) -> None:
    """Let the first process that needs a folder fill it; the others wait until that is done."""
    finished = Path(f"{folder}.finished")
    with FileLock(f"{folder}.lock"):
        if not finished.exists():
            folder.mkdir(exist_ok=True)
            make()
            finished.touch()
