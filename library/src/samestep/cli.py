"""The command ``samestep``: one table of commands, each imported when it is called."""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

from samestep import command_line
from samestep.errors import ConfigError
from samestep.ranks import process


class Command(NamedTuple):
    """One command: the function that does it, given its arguments, and what it is for."""

    main: str
    summary: str
    takes_overrides: bool = False
    """Whether it composes the configuration of a project, as train.py does. Its help is then the
    docstring of its module."""
    needs_project: bool = False
    """Whether it calls code of the user's project: always, if it takes overrides."""


COMMANDS = {
    "run": Command("samestep.node.run_script:main", "start a script on several ranks"),
    "doctor": Command("samestep.doctor:main", "run the checks before training, and stop", True),
    "evaluate": Command("samestep.evaluate:main", "test a run again", needs_project=True),
    "predict": Command("samestep.predict:main", "predict with a run", needs_project=True),
    "export": Command("samestep.export:main", "write a model for others", needs_project=True),
    "report": Command("samestep.report.live:main", "write report.html of a run"),
    "verify": Command("samestep.verify.main:main", "prove on your code that runs are the same"),
    "compare": Command("samestep.report.compare:main", "compare runs"),
    "runs": Command("samestep.report.listing:main", "list the runs of a folder"),
    "upload": Command("samestep.run.upload:main", "copy a run to a store again"),
    "launch": Command("samestep.launch.main:main", "send a run to a cluster", True),
    "status": Command("samestep.launch.main:status", "describe a run on a cluster", True),
    "logs": Command("samestep.launch.main:logs", "follow a run on a cluster", True),
    "cancel": Command("samestep.launch.main:cancel", "cancel a run on a cluster", True),
    "sweep": Command("samestep.sweep.main:main", "search for good values with Optuna", True),
    "completion": Command("samestep.completion:main", "print the completion for a shell"),
}

HINTS = dict.fromkeys(
    ("continue", "resume"),
    "a run continues when its command is repeated: RUN_ID=NAME python train.py, or python "
    "script.py with the same run_dir",
)
"""What those type whose other programs have a command for it."""


def main() -> NoReturn:
    """Do what the command line says, and exit."""
    process.run(lambda: command_line.call(command))


def command() -> int:
    """Call one command with its arguments, and return its exit code.

    Raises:
        ConfigError: if there is no such command, or its arguments are invalid.
        RunError: if it fails.
    """
    name, *argv = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print_commands()
        return 0
    if name == "--version":
        # Not at the top: it imports the parsers of mail and of zip files.
        from importlib.metadata import version

        print(f"samestep {version('samestep')}")
        return 0
    if name not in COMMANDS:
        hint = HINTS.get(name, f"choose from {', '.join(COMMANDS)}")
        raise ConfigError(f"samestep {name}: no such command; {hint}")
    chosen = COMMANDS[name]
    module, _, function = chosen.main.partition(":")
    asks_for_help = "-h" in argv or "--help" in argv
    if chosen.takes_overrides and asks_for_help:
        # These commands have no parser: their arguments are those of train.py.
        print(command_line.fit_terminal(read_docstring(module)))
        return 0
    needs_project = chosen.takes_overrides or chosen.needs_project
    # A help text can be read anywhere, the code of a run only in its project.
    if needs_project and not asks_for_help:
        from samestep.hydra.project import add_project

        add_project()
    exit_code: int = getattr(import_module(module), function)(argv)
    return exit_code


def print_commands() -> None:
    """Print the help text of ``samestep`` itself."""
    lines = ["samestep COMMAND [arguments], or samestep --version"]
    for name, command in COMMANDS.items():
        lines.append(f"  samestep {name:<10}  {command.summary}")
    lines += ["samestep COMMAND --help explains it.", command_line.EXIT_CODES]
    print(command_line.fit_terminal("\n".join(lines)))


def read_docstring(module: str) -> str:
    """The docstring of a module that is not imported: Hydra takes a third of a second."""
    spec = find_spec(module)
    assert spec
    assert spec.origin
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
