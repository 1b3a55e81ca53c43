"""The table of commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.programs import ROOT, environment, run
from samestep import cli
from samestep.cli import COMMANDS
from samestep.command_line import call

HEAVY = ("torch", "lightning", "hydra", "matplotlib", "optuna", "numpy")
CODE = f"""
import sys
from samestep.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules])
"""


def start(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``samestep`` in a fresh interpreter; the last line of stdout is what it has imported."""
    return run("-c", CODE, *words, cwd=cwd)


def test_without_a_command_the_commands_are_listed():
    for words in ([], ["--help"], ["-h"]):
        done = start(*words)
        assert (done.returncode, done.stderr) == (0, "")
        listed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  ")]
        assert listed == [*COMMANDS]
        assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_quick_and_works_anywhere(name: str, tmp_path: Path):
    """It imports no large library, and looks for no project."""
    done = start(name, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"samestep {name} " in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lunch", "samestep lunch: no such command; choose from run, doctor, report, "),
        ("runs --jsn", "samestep runs: --jsn: no such option; did you mean --json?"),
        ("runs nowhere", "nowhere is no folder"),
        ("compare nowhere", "nowhere: no such run"),
        ("report nowhere", "samestep report: nowhere must be the directory of a run"),
        ("upload nowhere", "samestep upload: nowhere must be the directory of a run"),
        ("image x", "samestep image: no such command; choose from run, doctor, report, "),
    ],
)
def test_invalid_arguments_are_one_message_and_quick(line: str, message: str, tmp_path: Path):
    done = start(*line.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["doctor", "launch", "logs", "sweep"])
def test_the_project_of_this_folder_is_imported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not another one, which is perhaps installed."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").touch()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["samestep", name, "=5"])
    assert call(cli.command) != 0  # its configuration is empty
    assert sys.path[0] == str(tmp_path / "src")


def test_options_of_torchrun_are_checked():
    done = run("-m", "samestep", "run", "--nproc-per-nod=2", "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: samestep run: ")
    assert done.stderr.count("\n") == 1


def test_a_list_of_runs_is_quick(tmp_path: Path):
    done = start("runs", str(tmp_path))
    assert done.stdout == f"There is no run in {tmp_path}.\n[]\n"


def test_the_command_is_installed_under_its_name():
    program = Path(sys.executable).with_name("samestep")
    done = subprocess.run([program], env=environment(), capture_output=True, text=True, check=True)
    assert "samestep launch " in done.stdout
