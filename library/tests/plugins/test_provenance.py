import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from library.tests.kit import make_spec
from samestep.plugins import provenance
from samestep.plugins.provenance import code_state, packages_of
from samestep.run import lifecycle, record


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with one commit."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "a.py").write_text("old = 1\n")
    git(code, "init", "--quiet")
    git(code, "add", ".")
    git(code, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    return code


def git(code: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=code, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.program
def test_what_has_a_secret_name_is_hidden_in_uncommitted_files(checkout: Path):
    (checkout / "a.py").write_text("PASSWORD = 'hunter2'\ntoken = next(tokens)\nname = 'a'\n")
    (checkout / "b.yaml").write_text("server:\n  password: hunter2\n  user: me\n")
    git(checkout, "add", "b.yaml")
    _, diff = code_state(checkout)
    assert "hunter2" not in diff
    assert "+PASSWORD = '***'\n+token = next(tokens)\n+name = 'a'\n" in diff
    assert "+  password: ***\n+  user: me\n" in diff


@pytest.mark.program
def test_uncommitted_code_is_kept_without_secrets(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    assert code_state(checkout) == (git(checkout, "rev-parse", "HEAD"), "")
    monkeypatch.setenv("FAKE_SECRET", "sesame-open-123")
    (checkout / "a.py").write_text("new = 2  # sesame-open-123\n")
    (checkout / "staged.py").write_text("staged = 3\n")
    git(checkout, "add", "staged.py")
    (checkout / "untracked.py").write_text("not shown")
    _, diff = code_state(checkout)
    assert "-old = 1\n+new = 2  # ***\n" in diff
    assert "+staged = 3\n" in diff
    assert "?? untracked.py\n" in diff
    git(checkout, "stash", "--quiet")  # the diff brings the same code back
    (checkout / "git.diff").write_text(diff)
    git(checkout, "apply", "git.diff")
    assert (checkout / "a.py").read_text() == "new = 2  # ***\n"


@pytest.mark.program
def test_code_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_state(tmp_path) == (None, "")
    monkeypatch.setenv("PATH", "")
    assert code_state(tmp_path) == (None, "")
    monkeypatch.setenv("PROJECT_REVISION", "4f2a")
    assert code_state(tmp_path) == ("4f2a", "")


def test_a_start_names_machine_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = distributions()
    canonical = {re.sub("[-_.]+", "-", one.name).lower(): one.version for one in installed}
    assert provenance.find_packages() == canonical
    (tmp_path / "My_own.package-1.2+cpu.dist-info").mkdir()
    (tmp_path / "pytest-0.1.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", ["/nowhere", *sys.path, str(tmp_path)])
    found = provenance.machine_info()
    assert found["packages"]["my-own-package"] == "1.2+cpu"
    assert found["packages"]["pytest"] == pytest.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["world_size"] == 1
    assert found["cpu_cores"] >= 1


def test_each_start_has_its_code_and_the_newest_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    machine = {"cpu": "fast", "packages": {"torch": "2"}}
    monkeypatch.setattr(provenance, "machine_info", lambda: machine)
    monkeypatch.setattr(provenance, "code_state", lambda code: ("abc", "+two"))
    run_dir = tmp_path / "run"
    for _ in range(2):
        lifecycle.begin(make_spec(run_dir), ["train.py"], plugins=[provenance])
    known = record.read(run_dir)
    assert known.start["git"] == {"commit": "abc", "dirty": True}
    assert [start.get("packages") for start in known.starts] == [None, "torch==2"]
    assert packages_of(known) == {"torch": "2"}
    assert [start["cpu"] for start in known.starts] == ["fast", "fast"]
    assert (run_dir / "logs/git.diff").read_text() == "+two"
