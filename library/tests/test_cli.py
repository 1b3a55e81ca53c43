"""The table of commands."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.run import get_args_parser

from library.tests.programs import ROOT, environment, run
from samestep import cli, option_names
from samestep.cli import COMMANDS
from samestep.command_line import Parser, call, fit_terminal
from samestep.hydra.compose import help_text
from samestep.hydra.main import flags_of
from samestep.node import run_script


@pytest.fixture(autouse=True)
def name_arguments() -> Iterator[None]:
    """Let messages name arguments again, after a command that names keys of a configuration."""
    yield
    option_names.use({}, {})


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


IN_TURN = f"""
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from samestep.cli import main
for line in sys.argv[1:]:
    sys.argv = ["samestep", *line.split()]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            code = end.code
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([code, out.getvalue(), err.getvalue(), heavy]))
"""
INVALID = {
    "lunch": "samestep lunch: no such command; choose from run, doctor, evaluate, ",
    "resume mine": "samestep resume: no such command; a run continues when its ",
    "runs --jsn": "samestep runs: --jsn: no such option; did you mean --json?",
    "runs nowhere": "nowhere is no folder",
    "compare nowhere": "nowhere: no such run",
    "report nowhere": "samestep report: nowhere must be the directory of a run",
    "upload nowhere": "samestep upload: nowhere must be the directory of a run",
    "verify --ranks 3": "samestep verify: needs the command that trains, after two dashes",
    "verify sleep 3": "samestep verify: needs the command that trains, after two dashes, such as "
    "samestep verify -- sleep 3\n",
    "verify --ranks 1 -- python": "samestep verify: argument --ranks: 1: must be a whole number",
    "verify --steps 2 -- python": "samestep verify: argument --steps: 2: must be a whole number",
    "verify --only x -- python": "samestep verify: --only x: choose from undisturbed; ",
    "verify --keep . -- python": "samestep verify: --keep .: exists already; name a new folder",
    "verify -- nosuch train.py": "samestep verify: nosuch: there is no such command",
}


def in_turn(folder: Path, *lines: str) -> list[tuple[str, int, str, str]]:
    """The exit code, stdout and stderr of each command line, which imports no large library."""
    done = run("-c", IN_TURN, *lines, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = []
    for line, text in zip(lines, done.stdout.splitlines(), strict=True):
        code, stdout, stderr, heavy = json.loads(text)
        assert heavy == [], line
        found.append((line, code, stdout, stderr))
    return found


@pytest.mark.program
def test_lists_and_help_are_quick_and_work_anywhere(tmp_path: Path):
    helps = [f"{name} --help" for name in COMMANDS]
    for line, code, stdout, stderr in in_turn(tmp_path, "", "-h", "--version", *helps, "runs ."):
        assert (code, stderr) == (0, ""), line
        if line in ("", "-h"):
            listed = [text.split()[1] for text in stdout.splitlines() if text.startswith("  ")]
            assert listed == [*COMMANDS]
        elif line == "--version":
            assert stdout == f"samestep {importlib.metadata.version('samestep')}\n"
        elif line == "runs .":
            assert stdout == "There is no run in ..\n"
        else:
            assert f"samestep {line.split()[0]} " in stdout


@pytest.mark.program
def test_invalid_arguments_are_one_message_and_quick(tmp_path: Path):
    for line, code, stdout, stderr in in_turn(tmp_path, *INVALID):
        assert (code, stdout) == (2, ""), line
        assert stderr.startswith(f"error: {INVALID[line]}")
        assert stderr.count("\n") == 1


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


ARGUMENTS = {"logs": ["mine"], "status": ["mine"], "cancel": ["mine"], "verify": ["--", "python"]}
OF_HYDRA = {"doctor", "sweep"}  # they take overrides, and no option


class Seen(Exception):
    """Ends a command when it has made its parser."""


def parsers() -> Iterator[tuple[str, Parser]]:
    """The parser of each command that has one."""

    def stop(parser: Parser, *_: object) -> None:
        raise Seen(parser)

    mains = {"train.py": flags_of}
    for name in COMMANDS.keys() - OF_HYDRA - {"run"}:
        module, _, function = COMMANDS[name].main.partition(":")
        mains[name] = getattr(import_module(module), function)
    for name, main in mains.items():
        with mock.patch.object(Parser, "parse", stop), pytest.raises(Seen) as seen:
            main(ARGUMENTS.get(name, []))
        yield name, seen.value.args[0]


def test_each_option_is_in_the_help_with_its_meaning_and_default(
    capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    for name, parser in parsers():
        text = help_text() if name == "train.py" else read_help(name, capsys, monkeypatch)
        program = "python train.py" if name == "train.py" else f"samestep {name}"
        assert f"\n{program} " in text or f" {program} " in text
        assert text.count("Exit codes: ") == 1, name
        is_text = name == "train.py" or COMMANDS[name].takes_overrides
        for action in parser._actions:
            # A text names one of "-m" and "--multirun"; "--help" is how it was found.
            options = {*action.option_strings} - {"-h", "--help"}
            named = [option for option in options if re.search(rf"\W{option}\b", text)]
            assert named or not options, (name, action.dest)
            if is_text:
                continue
            assert action.help, (name, action.dest)
            may_be_left_out = action.option_strings or action.default
            if may_be_left_out and action.nargs != 0:
                assert "default: " in action.help, (name, action.dest)


def read_help(name: str, capsys, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["samestep", name, "--help"])
    with suppress(SystemExit):  # of argparse
        cli.command()
    return capsys.readouterr().out


def test_help_of_run_names_options_of_torchrun(capsys):
    run_script.main(["--help"])
    named = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    # That of torch before 2.15 lacks this one.
    assert named <= known | {"--shutdown-timeout"}


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_the_terminal(columns: int, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        text = read_help(name, capsys, monkeypatch)
        monkeypatch.setenv("COLUMNS", "200")
        whole = read_help(name, capsys, monkeypatch)
        monkeypatch.setenv("COLUMNS", str(columns))
        assert "".join(text.split()) == "".join(whole.split())
        for line in text.splitlines():
            is_one_word = len(line.split()) == 1
            assert len(line) <= columns or is_one_word, (name, line)


def test_a_narrow_help_has_the_lines_of_the_wide_one(monkeypatch: pytest.MonkeyPatch):
    text = (
        "This sentence was continued on a second line because it is longer than a hundred "
        "of those\n"
        "characters-in-one.\n"
        "samestep runs\n"
        "samestep runs --json\n"
        "\n"
        "--some-option=N  a text that is too long for a terminal of sixty columns\n"
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert fit_terminal(text).splitlines() == [
        "This sentence was continued on a second line because it is",
        "longer than a hundred of those characters-in-one.",
        "samestep runs",
        "samestep runs --json",
        "",
        "--some-option=N  a text that is too long for a terminal of",
        "                 sixty columns",
    ]


def test_a_script_is_told_that_it_has_no_project(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["samestep", "evaluate", "runs/mine"])
    assert call(cli.command) == 2
    assert "a script with samestep.Trainer needs none" in capsys.readouterr().err


@pytest.mark.program
def test_options_of_torchrun_are_checked():
    done = run("-m", "samestep", "run", "--nproc-per-nod=2", "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("error: samestep run: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.program
def test_the_command_is_installed_under_its_name():
    program = Path(sys.executable).with_name("samestep")
    done = subprocess.run([program], env=environment(), capture_output=True, text=True, check=True)
    assert "samestep launch " in done.stdout
