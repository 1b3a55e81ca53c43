"""How every command line is read, and how its errors are printed. Imports no torch."""

import argparse
import difflib
import logging
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, failure

TEXT_WIDTH = 100  # columns of the help texts in the code
EXIT_CODES = "Exit codes: 0 done, 1 error, 2 invalid arguments or configuration."
RUNS = Path("runs")  # where runs are, unless run_root or run_dir says otherwise
RUN_DIR = "directory of the run, such as runs/mine, or its name in runs"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors.

    Its help ends with the exit codes of all commands, unless ``help_text`` names others.

    Args:
        name: what the user types, such as ``samestep runs``.
        help_text: the description, printed as it is.
        options: others of ``argparse.ArgumentParser``.
    """

    def __init__(self, name: str, help_text: str | None, **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        if "Exit codes: " not in (help_text or ""):
            options["epilog"] = fit_terminal(EXIT_CODES)
        description = None if help_text is None else fit_terminal(help_text)
        super().__init__(name, description=description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError: argparse itself prints the usage and exits."""
        # Of a flag, such as --multirun=seed=1,2.
        flag = re.fullmatch(r"argument (\S+): ignored explicit argument (.+)", message)
        if flag:
            message = f"{flag[1]}: takes no value; put a space before {flag[2]}"
        raise ConfigError(f"{self.prog}: {message.removeprefix('argument run_dir: ')}")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The arguments; options may stand between them. ``argv=None`` takes those of the process.

        Raises:
            ConfigError: if one is unknown, missing or wrong.
        """
        words = [expand_home(word) for word in (sys.argv[1:] if argv is None else argv)]
        arguments, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self.error(f"{unknown[0]}: no such option; {self.hint(unknown[0], words)}")
        return arguments

    def hint(self, option: str, words: Sequence[str]) -> str:
        """What was probably meant by an unknown option, which is one of the ``words``."""
        names = re.findall(r"--[a-z-]+", self.format_help())
        near = difflib.get_close_matches(option.partition("=")[0], names, n=1)
        return f"did you mean {near[0]}?" if near else "--help lists all"

    def add_run_dir(self) -> None:
        """Add the first argument of all commands that read one run: ``run_dir``, a Path."""
        # "?" with a default: a missing argument is then reported by `check_run_dir` too. argparse
        # itself would show it in brackets, as one that may be left out.
        self.usage = f"{self.prog} [options] run_dir"
        self.add_argument("run_dir", nargs="?", default="", type=check_run_dir, help=RUN_DIR)

    def read_run_dir(self, text: str) -> Path:
        """The path, if it is the directory of a run.

        Raises:
            ConfigError: if it is none.
        """
        try:
            return check_run_dir(text)
        except argparse.ArgumentTypeError as error:
            self.error(str(error))

    def add_ckpt(self) -> None:
        """Add the choice of a checkpoint: ``ckpt``, None if none was named, and ``trust``."""
        ckpts = "checkpoint: best, last, or a kept one such as epoch-0002; default: the tested one"
        self.add_argument("--ckpt", metavar="NAME", help=ckpts)
        trust = "call any code that config.yaml of the run names; only if you trust who made it"
        self.add_argument("--trust", action="store_true", help=trust)

    def add_accelerator(self) -> None:
        """Add the device that a model computes on: ``accelerator``."""
        text = "device that computes; default: auto, a GPU if there is one"
        self.add_argument(
            "--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help=text
        )

    def add_json(self) -> None:
        """Add the choice of a form for programs: ``json``."""
        self.add_argument("--json", action="store_true", help="print JSON instead of tables")

    def add_data(self) -> None:
        """Add where the data are now, if not where the run found them.

        These are ``root``, ``file``, ``mirror`` and ``download``, each None if it was not named.
        """
        add = self.add_argument_group("data, if they are elsewhere now").add_argument
        add("--data-root", dest="root", metavar="DIR", help="their folder; default: as in the run")
        add("--data-file", dest="file", metavar="FILE", help="their file; default: as in the run")
        text = "where to download them; default: as in the run"
        add("--data-mirror", dest="mirror", metavar="URL", help=text)
        text = "download missing data into --data-root, or never; default: never, without --trust"
        add("--download", action=argparse.BooleanOptionalAction, help=text)


def fit_terminal(help_text: str) -> str:
    """The text with shorter lines where the terminal is narrower than ``TEXT_WIDTH``."""
    columns = shutil.get_terminal_size((TEXT_WIDTH, 0)).columns
    if columns >= TEXT_WIDTH:
        return help_text
    lines: list[str] = []
    room = 0  # after the line before, if it is prose
    for line in help_text.splitlines():
        first, *_ = line.split() or [""]
        # Where the next word had room, the line was ended on purpose.
        if is_prose(line) and 0 < room <= len(first):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
        room = TEXT_WIDTH - len(line) if is_prose(line) else 0
    return "\n".join(wrap(line, columns) for line in lines)


def is_prose(line: str) -> bool:
    """Whether a line is neither empty, nor indented, nor one of a list with columns."""
    return bool(line) and not line.startswith(" ") and "  " not in line


def wrap(line: str, columns: int) -> str:
    """The line in several; a column of it stays one."""
    indent = max((gap.end() for gap in re.finditer(r"(?:^| ) +", line)), default=0)
    if len(line) > columns and indent > columns // 2:
        line = re.sub(r"(?<=\S)  +", "  ", line)
        indent = 4
    filled = textwrap.fill(
        line,
        columns,
        subsequent_indent=indent * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    # Lines of blanks are empty for textwrap, and no longer lines.
    return filled or line


def expand_home(word: str) -> str:
    """A word of a command line; of ``--data-root=~/data`` with the home directory, as typed apart.

    Shells expand ``~`` only where a word begins.
    """
    name, sign, value = word.partition("=")
    if name.startswith("--") and value.startswith("~"):
        return f"{name}{sign}{environment.expand_home(value, name)}"
    return word


def find_run(text: str) -> Path:
    """The path of a run, or of a folder of runs: as typed, or by its name in ``runs``."""
    # The first, unless only the second exists.
    return max((Path(text), RUNS / text), key=Path.exists)


def check_run_dir(text: str) -> Path:
    """The path, if it is the directory of a run; otherwise an error that names the newest runs."""
    try:
        run_dir = find_run(text)
        if text and (run_dir / "config.yaml").exists():
            return run_dir
    except OSError as error:  # such as a name that is too long, or a folder that is not ours
        raise argparse.ArgumentTypeError(f"{text[:80]}: {error.strerror}") from error
    runs = sorted(RUNS.glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime)
    newest = "".join(f"\n  {path.parent}" for path in runs[:3])
    hint = f"the newest are{newest}" if runs else "python train.py makes one in runs/"
    if text.startswith("run=") and Path(text.removeprefix("run=")).is_dir():
        hint = f"did you mean {text.removeprefix('run=')}?"
    raise argparse.ArgumentTypeError(f"{text or 'it'} must be the directory of a run; {hint}")


def print_results_only() -> None:
    """Silence what libraries log: a command prints its results, and nothing between them."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)  # meant for the developers of libraries


def call(main: Callable[[], int]) -> int:
    """Call the main of a command; an error becomes one message on stderr, and the exit code.

    Returns:
        What ``main`` returns; 2 after invalid arguments or a wrong configuration, 1 after other
        errors.
    """
    try:
        return main()
    except (ConfigError, RunError) as error:
        return failure.report(error)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return failure.report(RunError(text))
