"""The tools of labs/e2e, which CI can only use where there is a cluster."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment

pytestmark = pytest.mark.program


def test_it_needs_neither_torch_nor_xdist():
    command = ["-p", "no:xdist", "--confcutdir=labs/e2e", "-q", "labs/e2e"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command], cwd=ROOT, env=environment(E2E="0"), text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "9 skipped" in done.stdout
