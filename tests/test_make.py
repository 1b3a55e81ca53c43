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
case "$*" in *"$BREAKS_AT") kill -9 $$;; esac
"""


class Clone:
    """A clone of the repository in which an installation takes no time."""

    def __init__(self, root: Path):
        self.root = root
        for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-dev.lock"):
            shutil.copy(ROOT / name, root)
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


def installs(commands: list[str]) -> list[str]:
    return [line.split()[-1] for line in commands if "-m venv" in line or is_install(line)]


def is_install(line: str) -> bool:
    return line.startswith(("-m pip install ", "scripts/install.py "))


PYTEST = "-m pytest --dist worksteal"
LEVELS = ["test", "test-programs", "test-all"]
TEST = f"{PYTEST} -n 3 -m not program and not nightly"
FRESH = [".venv", "/dev/stdin", "/dev/stdin", "requirements.lock", "."]


def test_train_installs_once(clone: Clone):
    done, commands = clone.make("train")
    assert done.returncode == 0, done.stderr
    assert "Installing into .venv, once" in done.stdout
    assert installs(commands) == FRESH
    assert commands[-1] == "train.py"
    assert clone.make("train")[1] == ["train.py"]


def test_nothing_is_installed_without_a_hash_but_the_repository_itself(clone: Clone):
    found = [line for line in clone.make("test")[1] if is_install(line)]
    assert len(found) == 5
    for line in found:
        assert "--require-hashes" in line or "--no-deps -r samestep.txt -e ." in line
        assert "--no-build-isolation" in line or "/dev/stdin" in line


def test_pip_installs_where_there_is_no_uv(clone: Clone):
    done, commands = clone.make(
        "train", breaks_at="--only-binary uv --require-hashes -r /dev/stdin"
    )
    assert done.returncode == 0, done.stderr
    assert "There is no uv for this machine; pip installs the rest" in done.stdout
    assert installs(commands) == FRESH
    assert commands[-1] == "train.py"


def test_test_adds_to_what_train_installed(clone: Clone):
    clone.make("train")
    commands = clone.make("test")[1]
    assert installs(commands) == ["requirements-dev.lock"]
    assert clone.make("test")[1] == [TEST]
    assert clone.make("train")[1] == ["train.py"]


@pytest.mark.parametrize("breaks_at", ["/dev/stdin", "requirements.lock", "."])
def test_an_install_that_broke_off_starts_over(clone: Clone, breaks_at: str):
    done, commands = clone.make("train", breaks_at=breaks_at)
    assert done.returncode == 2
    assert installs(commands)[-1] == breaks_at
    assert installs(clone.make("train")[1]) == FRESH


def test_development_tools_that_broke_off_leave_no_environment_to_trust(clone: Clone):
    clone.make("train")
    done, _ = clone.make("test", breaks_at="requirements-dev.lock")
    assert done.returncode == 2
    assert installs(clone.make("train")[1]) == FRESH


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("requirements.lock", [*FRESH, "requirements-dev.lock"]),
        ("requirements-dev.lock", ["requirements-dev.lock"]),
        ("pyproject.toml", []),
    ],
)
def test_a_changed_lock_is_installed(clone: Clone, name: str, expected: list[str]):
    clone.make("test")
    for path in [*clone.root.glob("*.*"), *clone.root.glob(".venv/*.stamp")]:
        os.utime(path, (1_000, 1_000 if path.name != name else 2_000))
    assert installs(clone.make("test")[1]) == expected


def test_a_copied_or_damaged_environment_is_not_trusted(clone: Clone, tmp_path: Path):
    clone.make("test")
    clone.root = shutil.copytree(
        clone.root, tmp_path / "copy of the clone", copy_function=shutil.copy2
    )
    assert installs(clone.make("test")[1]) == [*FRESH, "requirements-dev.lock"]
    (clone.root / ".venv/bin/python").unlink()
    assert installs(clone.make("train")[1]) == FRESH


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


def pins(name: str) -> dict[str, str]:
    """Name to version, of a lock file in which each has a hash."""
    text = (ROOT / name).read_text()
    found = re.findall(r"^([a-z0-9-]+)==([^ ]+)[^\\\n]* \\\n    --hash=sha256:", text, re.M)
    assert len(found) == len(re.findall(r"^[a-z]", text, re.M))
    return dict(found)


INSTALLED_PARTS = ("hydra", "report", "launch", "sweep")


def test_locks_are_hashed_and_agree_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    runtime, everything = pins("requirements.lock"), pins("requirements-dev.lock")
    assert runtime.items() <= everything.items()
    library = tomllib.loads((ROOT / "library/pyproject.toml").read_text())
    parts = [library["project"]["dependencies"]]
    parts += [library["project"]["optional-dependencies"][name] for name in INSTALLED_PARTS]
    needed = [line for part in parts for line in part if not line.startswith("samestep")]
    needed += project["project"]["dependencies"][1:] + project["dependency-groups"]["build"]
    assert {re.split(r"[<>=!\[]", line)[0] for line in needed} <= runtime.keys()
    assert runtime["lightning"] not in ("2.6.2", "2.6.3")
    assert {"!=2.6.2", "!=2.6.3"} <= set(re.findall("!=[0-9.]+", " ".join(needed)))


def test_locks_name_no_index_and_no_machine():
    for name in ("requirements.lock", "requirements-dev.lock"):
        lines = (ROOT / name).read_text().splitlines()
        assert not [x for x in lines if "://" in x or re.search(r"(^|\s)(/|--[^h])", x)]
