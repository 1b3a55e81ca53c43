"""The documentation site: built strictly, complete, and without a request to another server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("mkdocs", reason="make test installs it")
PUBLIC = (
    "Trainer",
    "BatchLoader",
    "EpochMean",
    "ConfigError",
    "RunError",
    "Checkpoints",
    "LossGuard",
)


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet, with which --strict has no effect.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DOCS_REPOSITORY": "https://host/us"}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)


def test_the_site_is_complete(tmp_path: Path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("index.html")}
    for source in (ROOT / "docs").rglob("*.md"):
        name = source.relative_to(ROOT / "docs").with_suffix("").as_posix().removesuffix("README")
        assert f"{name.rstrip('/')}/index.html" in pages, name
    texts = {name: path.read_text() for name, path in pages.items()}
    for name in PUBLIC:
        assert re.search(rf'id="samestep[\w.]*\.{name}"', texts["reference/index.html"]), name
    home = texts["index.html"]
    for link in (
        'href="start/"',
        'href="https://host/us/blob/main/LICENSE"',
        'src="img/report.png"',
    ):
        assert link in home
    for image in re.findall(r'<img [^>]*src="([\w/.]+)"', home):
        assert (tmp_path / image).is_file(), image
    loaded = [
        line
        for text in texts.values()
        for line in re.findall(r"<(?:script|link)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*", text)
        if "canonical" not in line
    ]
    assert loaded == []
