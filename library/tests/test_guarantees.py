"""The guarantees of a run that a plain script starts. The template's: tests/samestep."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from library.tests.guarantees import *  # noqa: F403
from library.tests.programs import run

pytestmark = pytest.mark.program


class Script:
    """Starts ``library.tests.small`` as a plain script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def option(self, name: str) -> str:
        return name

    def __call__(self, name: str, /, **options: Any) -> CompletedProcess[str]:
        variables = {key: value for key, value in options.items() if key.isupper()}
        arguments = {key: value for key, value in options.items() if not key.isupper()}
        base = {"run_dir": f"runs/{name}", "max_epochs": 3, "devices": 1}
        base |= {"monitor": "val/loss", "mode": "min"}
        words = json.dumps(base | arguments)
        return run("-m", "library.tests.small", words, cwd=self.folder, **variables)


@pytest.fixture
def start(tmp_path: Path) -> Script:
    return Script(tmp_path)


@pytest.fixture(params=["32-true", "64-true"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)
