"""Trials that are Jobs of Kubernetes. On real servers: tests/labs/servers/test_search.py."""

import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.programs import PATIENCE_S
from tests.conftest import ROOT, environment

pytestmark = pytest.mark.program


def test_the_manifests_are_checked_before_the_first_trial(tmp_path: Path):
    words = ["sweep=digits_lr", "cluster=k8s", "callbacks.artifacts.url=s3://bucket/runs"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/samestep_here.py"), "sweep", *words],
        cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "cluster.image=registry.example.com/project:0.1.0" in done.stderr
    assert not list(tmp_path.iterdir())
