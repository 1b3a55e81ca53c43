"""What ``make`` installs and starts, with a stand-in for Python that only writes down its words."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[1]
# Stands in for Python and pip: writes down each command, and kills itself at a given one.
PYTHON = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in "-m venv --clear .venv")
    rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python;; esac
case "$*" in "-m pip config list") exit;; *"$BREAKS_AT"*) kill -9 $$;; esac
"""


class Clone:
    """A clone of the repository in which an installation takes no time."""

    def __init__(self, root: Path):
        self.root = root
        (root / "scripts").mkdir()
        for name in ("Makefile", "pyproject.toml", "requirements.lock", "scripts/packages.sh"):
            shutil.copy(ROOT / name, root / name)
        (root / "python3").write_text(PYTHON)
        (root / "python3").chmod(0o755)

    def make(self, *arguments: str, breaks_at: str = "nowhere", python: str = "./python3"):
        """The finished process, and the commands that Python was called with."""
        log = self.root / "log"
        log.write_text("")
        env = {
            "PATH": os.environ["PATH"],
            "LOG": str(log),
            "BREAKS_AT": breaks_at,
            "PYTHON": python,
        }
        done = subprocess.run(
            ["make", *arguments], cwd=self.root, env=env, capture_output=True, text=True
        )
        return done, [line for line in log.read_text().splitlines() if not line.startswith("-c ")]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    (tmp_path / "clone").mkdir()
    return Clone(tmp_path / "clone")


STEPS = {
    "-m venv": "venv",
    "-m pip install": "tools",
    "-m uv pip compile": "choose",
    "-m uv pip sync": "sync",
    "-m uv pip install": "own",
}


def installs(commands: list[str]) -> list[str]:
    """The steps of an installation; what the development tools need is in capitals."""
    found = []
    for line in commands:
        for command, step in STEPS.items():
            if line.startswith(command):
                found.append(step.upper() if "--extra dev" in line else step)
    return found


PYTEST = "-m pytest --dist worksteal"
LEVELS = ["test", "test-programs", "test-all"]
TEST = f"{PYTEST} -n 3 -m not program and not nightly"
UPDATE = ["tools", "choose", "sync", "tools", "own"]
UPDATE_DEV = ["tools", "CHOOSE", "sync", "tools", "own"]


def test_train_installs_once(clone: Clone):
    done, commands = clone.make("train")
    assert done.returncode == 0, done.stderr
    assert "Installing into .venv" in done.stdout
    assert installs(commands) == ["venv", *UPDATE]
    assert commands[-1] == "train.py"
    assert clone.make("train")[1] == ["train.py"]


def test_nothing_is_installed_without_a_hash_but_the_repository_itself(clone: Clone):
    found = [line for line in clone.make("test")[1] if re.search(r" (install|sync) ", line)]
    assert len(found) == 4
    for line in found:
        assert "--require-hashes" in line or "--no-deps" in line
        assert "--no-build-isolation" in line or "/dev/stdin" in line


def test_test_adds_to_what_train_installed(clone: Clone):
    clone.make("train")
    commands = clone.make("test")[1]
    assert installs(commands) == UPDATE_DEV
    assert clone.make("test")[1] == [TEST]
    assert clone.make("train")[1] == ["train.py"]


@pytest.mark.parametrize("target", ["train", "test"])
@pytest.mark.parametrize("breaks_at", ["-m pip install", "-m uv pip sync", "-m uv pip install"])
def test_an_install_that_broke_off_starts_over(clone: Clone, target: str, breaks_at: str):
    if target == "test":
        clone.make("train")
    done, commands = clone.make(target, breaks_at=breaks_at)
    assert done.returncode == 2
    assert installs(commands)[-1] == STEPS[breaks_at]
    assert installs(clone.make("train")[1]) == ["venv", *UPDATE]


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml", "vendor/tiny-1.whl"])
def test_what_has_changed_is_installed(clone: Clone, name: str):
    (clone.root / "vendor").mkdir()
    (clone.root / "vendor/tiny-1.whl").touch()
    clone.make("test")
    for path in [*clone.root.glob("*.*"), *clone.root.glob(".venv/*.stamp")]:
        os.utime(path, (1_000, 1_000))
    os.utime(clone.root / "vendor/tiny-1.whl", (1_000, 1_000))
    assert installs(clone.make("test")[1]) == []
    os.utime(clone.root / name, (2_000, 2_000))
    assert installs(clone.make("test")[1]) == UPDATE_DEV
    assert installs(clone.make("test")[1]) == []


def test_a_copied_or_damaged_environment_is_not_trusted(clone: Clone, tmp_path: Path):
    clone.make("test")
    clone.root = shutil.copytree(
        clone.root, tmp_path / "copy of the clone", copy_function=shutil.copy2
    )
    assert installs(clone.make("test")[1]) == ["venv", *UPDATE_DEV]
    (clone.root / ".venv/bin/python").unlink()
    assert installs(clone.make("train")[1]) == ["venv", *UPDATE]


def test_lock_needs_no_packages(clone: Clone):
    done, commands = clone.make("lock", "ARGS=--upgrade")
    assert done.returncode == 0, done.stderr
    assert installs(commands) == ["venv", "tools", "choose"]
    assert commands[-1].endswith("--output-file requirements.lock --upgrade")


# Says that it is another version, which is the name of its file.
OTHER_PYTHON = f"""#!/bin/sh
exec {sys.executable} -c 'import sys
sys.version_info = tuple(map(int, sys.argv[2].split(".")))
exec(sys.argv[1])' "$2" "${{0##*/}}"
"""


@pytest.mark.parametrize("python", ["false", "no_such_python", "./3.10", "./3.15"])
def test_a_python_that_does_not_fit_is_one_clear_line(clone: Clone, python: str):
    if python.startswith("./"):
        (clone.root / python).write_text(OTHER_PYTHON)
        (clone.root / python).chmod(0o755)
    done, _ = clone.make("train", python=python)
    assert done.returncode == 2
    message, own_line_of_make = done.stderr.splitlines()
    assert message.startswith(f"Needs Python 3.11 to 3.14, and {python} is not")
    assert own_line_of_make.startswith("make: ***")
    assert not (clone.root / ".venv").exists()


def test_arguments_reach_the_command(clone: Clone):
    assert clone.make("train", "ARGS=data=mnist seed=1")[1][-1] == "train.py data=mnist seed=1"
    assert (
        clone.make("test", "ARGS=-x tests/project/model/nets")[1][-1]
        == f"{TEST} -x tests/project/model/nets"
    )


def test_three_levels_of_tests(clone: Clone):
    clone.make("test")
    assert clone.make("test")[1] == [TEST]
    assert clone.make("test-programs")[1] == [f"{PYTEST} -n 5 -m program and not nightly"]
    assert clone.make("test-all")[1] == [f"{PYTEST} -n 5"]


def test_help_is_the_default_and_starts_nothing(clone: Clone):
    done, commands = clone.make()
    targets = [line.split()[1] for line in done.stdout.splitlines()]
    assert targets == ["help", "train", *LEVELS, "lint", "format", "lock"]
    assert commands == []


def pins() -> dict[str, str]:
    """Name to version, of the lock file, in which each has a hash."""
    text = (ROOT / "requirements.lock").read_text()
    found = re.findall(r"^([a-z0-9-]+)==([^ ]+)[^\\\n]* \\\n    --hash=sha256:", text, re.M)
    assert len(found) == len(re.findall(r"^[a-z]", text, re.M))
    return dict(found)


def test_the_lock_is_hashed_and_agrees_with_pyproject():
    locked = pins()
    library = tomllib.loads((ROOT / "library/pyproject.toml").read_text())["project"]
    parts = [library["dependencies"], *library["optional-dependencies"].values()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts += [project["project"]["dependencies"], project["dependency-groups"]["build"]]
    parts += project["project"]["optional-dependencies"].values()
    needed = [
        line for part in parts for line in part if not line.startswith(("samestep", "project"))
    ]
    assert {re.split(r"[<>=!\[]", line)[0] for line in needed} <= locked.keys()
    assert locked["lightning"] not in ("2.6.2", "2.6.3")
    assert {"!=2.6.2", "!=2.6.3"} <= set(re.findall("!=[0-9.]+", " ".join(needed)))


def test_the_lock_names_no_index_and_no_machine():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert not [x for x in lines if "://" in x or re.search(r"(^|\s)(/|--[^h])", x)]
