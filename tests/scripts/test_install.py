"""``scripts/install.py`` installs a package of its own, from a folder: without an index."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import install
import pytest

from tests.conftest import ROOT

LISTED = """\
:env:.find-links='/opt/wheels here'
:env:.index-url='https://host/env'
global.cert='/etc/ours.pem'
global.extra-index-url='\\nhttps://host/one\\nhttps://host/two'
global.index-url='https://host/global'
global.trusted-host='host other'
install.index-url='https://host/install'
install.no-cache-dir='true'
list.format='columns'
"""


def test_uv_takes_the_index_of_pip():
    """Files for all commands, then those for one, then variables; of several values each."""
    found = install.settings_of_uv(LISTED, {})
    assert found.pop("UV_SYSTEM_CERTS", "1") == "1"
    assert found == {
        "SSL_CERT_FILE": "/etc/ours.pem",
        "UV_DEFAULT_INDEX": "https://host/env",
        "UV_FIND_LINKS": "/opt/wheels,here",
        "UV_INDEX": "https://host/one https://host/two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INSECURE_HOST": "host other",
        "UV_NO_CACHE": "true",
    }
    ours = {"UV_INDEX": "https://host/three", "SSL_CERT_FILE": "/etc/mine.pem"}
    assert found.keys() - install.settings_of_uv(LISTED, ours).keys() == ours.keys()


def test_without_settings_of_pip_uv_has_its_own():
    assert install.settings_of_uv("", {}).keys() <= {"UV_SYSTEM_CERTS"}


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of a package, and ``right.txt`` and ``wrong.txt`` with its hash."""
    folder = tmp_path_factory.mktemp("links")
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    files = {
        "tiny.py": "",
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: us\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "tiny-1.0.dist-info/RECORD"
    lines = [f"{record},,\n"]
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
        lines.append(f"{name},sha256={digest.decode().rstrip('=')},{len(text)}\n")
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in {**files, record: "".join(lines)}.items():
            file.writestr(name, text)
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for name, digest in (("right", right), ("wrong", "0" * 64)):
        (folder / f"{name}.txt").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    return folder


def start(
    links: Path, target: Path, name: str, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("uv", reason="make installs it")
    kept = {name: value for name, value in os.environ.items() if name[:3] not in ("UV_", "PIP")}
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(links), "UV_NO_CACHE": "1"}
    command = [sys.executable, "scripts/install.py", "--no-index", "--target", str(target)]
    return subprocess.run(
        [*command, "--require-hashes", "-r", str(links / f"{name}.txt")],
        cwd=ROOT, env={**kept, **offline, **variables}, capture_output=True, text=True,
    )  # fmt: skip


def installer(target: Path) -> str:
    return (target / "tiny-1.0.dist-info/INSTALLER").read_text().strip()


@pytest.mark.program
def test_uv_installs_what_pip_is_told_to_find(links: Path, tmp_path: Path):
    done = start(links, tmp_path, "right", {})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert installer(tmp_path) == "uv"


@pytest.mark.program
def test_pip_installs_what_uv_cannot(links: Path, tmp_path: Path):
    done = start(links, tmp_path, "right", {"UV_FIND_LINKS": str(tmp_path / "nowhere")})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "uv has failed; pip tries again, which takes minutes ...\n"
    assert installer(tmp_path) == "pip"


@pytest.mark.program
def test_a_wrong_hash_is_installed_by_neither(links: Path, tmp_path: Path):
    done = start(links, tmp_path, "wrong", {})
    assert done.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not [*tmp_path.glob("tiny*")]
