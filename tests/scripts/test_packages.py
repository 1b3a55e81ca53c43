"""``scripts/packages.sh`` installs a package of its own, from a folder: without an index."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.program

# Stands in for Python: says what pip has been told, and with which variables uv is called.
PYTHON = """#!/bin/sh
case "$*" in
    *"pip config list") cat "$LISTED";;
    *"uv pip"*) env;;
esac
"""
LISTED = r"""
:env:.find-links='/opt/wheels here'
:env:.index-url='https://host/env'
global.cert='/etc/ours.pem'
global.extra-index-url='\nhttps://host/one\nhttps://host/two'
global.index-url='https://host/global'
global.timeout='60'
global.trusted-host='host other'
install.no-cache-dir='true'
install.timeout='180'
list.format='columns'
"""


def variables_of_uv(folder: Path, listed: str, **variables: str) -> dict[str, str]:
    """The variables with which uv is called if pip has these settings."""
    (folder / "listed").write_text(listed)
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    env = {"PATH": os.environ["PATH"], "PYTHON": "./python", "LISTED": "listed", **variables}
    (folder / "requirements.lock").touch()
    done = subprocess.run(
        ["sh", ROOT / "scripts/packages.sh", "lock"],
        cwd=folder, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = (line.partition("=") for line in done.stdout.splitlines())
    found = {name: value for name, _, value in lines if re.match("UV_|SSL_", name)}
    assert found.pop("UV_SYSTEM_CERTS") == "1"
    assert found.pop("UV_INDEX_STRATEGY") == "unsafe-best-match"
    return found


def test_uv_takes_the_index_of_pip(tmp_path: Path):
    """Variables before files for `install`, and these before files for all commands."""
    found = variables_of_uv(tmp_path, LISTED)
    assert found == {
        "SSL_CERT_FILE": "/etc/ours.pem",
        "UV_DEFAULT_INDEX": "https://host/env",
        "UV_FIND_LINKS": "/opt/wheels,here",
        "UV_HTTP_TIMEOUT": "180",
        "UV_INDEX": " https://host/one https://host/two",
        "UV_INSECURE_HOST": "host other",
        "UV_NO_CACHE": "true",
    }
    ours = {"UV_INDEX": "https://host/three", "SSL_CERT_FILE": "/etc/mine.pem"}
    assert variables_of_uv(tmp_path, LISTED, **ours) == {**found, **ours}


def test_without_settings_of_pip_uv_has_its_own(tmp_path: Path):
    assert variables_of_uv(tmp_path, "") == {}


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "project"
version = "1.0"
dependencies = ["tiny"]
[project.optional-dependencies]
dev = ["other"]
[dependency-groups]
build = []
[tool.hatch.build.targets.wheel]
bypass-selection = true
[tool.hatch.build]
dev-mode-dirs = ["."]
"""


def write_wheel(folder: Path, name: str) -> str:
    """Write the wheel of an empty package; return its line of a lock."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{info}/RECORD,,\n"]
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        lines.append(f"{path},sha256={digest.decode().rstrip('=')},{len(text)}\n")
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path, text in {**files, f"{info}/RECORD": "".join(lines)}.items():
            file.writestr(path, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one package and one extra, and an environment that has uv and hatchling."""
    pytest.importorskip("uv", reason="make installs it")
    links = tmp_path / "links"
    links.mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "requirements.lock").write_text(
        write_wheel(links, "tiny") + write_wheel(links, "other")
    )
    venv.create(tmp_path / ".venv", symlinks=True)
    (installed,) = [path for path in sys.path if path.endswith("site-packages")][:1]
    (site_packages(tmp_path) / "tools.pth").write_text(installed)
    return tmp_path


def site_packages(project: Path) -> Path:
    return next(project.glob(".venv/lib/python3*/site-packages"))


def packages(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name[:3] not in ("UV_", "PIP")}
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "links", "UV_OFFLINE": "1"}
    return subprocess.run(
        ["sh", ROOT / "scripts/packages.sh", *arguments],
        cwd=project, env={**kept, **offline, "UV_NO_CACHE": "1", "PYTHON": ".venv/bin/python"},
        capture_output=True, text=True,
    )  # fmt: skip


def installed(project: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in site_packages(project).glob("*.dist-info")}


NEXT = "After a change in pyproject.toml, `make lock` is next.\n"


def test_what_is_asked_for_is_installed_and_no_more(project: Path):
    for arguments, found in (
        (["sync", "--extra", "dev"], {"tiny", "other"}),
        (["sync"], {"tiny"}),
        (["own"], {"tiny", "project"}),
    ):
        done = packages(project, *arguments)
        assert done.returncode == 0, done.stderr
        assert installed(project) == found


@pytest.mark.parametrize("damage", ["wrong", "missing"])
def test_no_package_is_installed_without_its_hash(project: Path, damage: str):
    lock = project / "requirements.lock"
    tiny, other = lock.read_text().splitlines(keepends=True)
    lock.write_text((tiny[:-65] + "0" * 64 + "\n" if damage == "wrong" else "") + other)
    done = packages(project, "sync")
    assert done.returncode == 1
    assert done.stderr.endswith(NEXT)
    assert installed(project) == set()


def test_an_edit_that_the_lock_does_not_know_says_what_is_next(project: Path):
    (project / "pyproject.toml").write_text(PROJECT.replace('"tiny"', '"tiny>=2"'))
    done = packages(project, "sync")
    assert done.returncode == 1
    assert "tiny" in done.stderr
    assert done.stderr.endswith(NEXT)
