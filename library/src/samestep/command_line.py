"""How every command line is read, and how its errors are printed. Imports no torch."""

import argparse
import difflib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, failure


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors.

    Args:
        name: what the user types, such as ``samestep runs``.
        help_text: the description, printed as it is.
        options: others of ``argparse.ArgumentParser``.
    """

    def __init__(self, name: str, help_text: str | None, **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(name, description=help_text, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError: argparse itself prints the usage and exits."""
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
        # "?" with a default: a missing argument is then reported by `check_run_dir` too.
        self.add_argument("run_dir", nargs="?", default="", type=check_run_dir, help="runs/<id>")

    def add_ckpt(self) -> None:
        """Add the choice of a checkpoint: ``ckpt``, None if none was named, and ``trust``."""
        ckpts = "best, last, or one that was kept, such as epoch-0002; default: the tested one"
        self.add_argument("--ckpt", metavar="NAME", help=ckpts)
        trust = "call whatever config.yaml of this run names; only if you trust who made it"
        self.add_argument("--trust", action="store_true", help=trust)

    def add_accelerator(self) -> None:
        """Add the device that a model computes on: ``accelerator``."""
        self.add_argument(
            "--accelerator", choices=["auto", "cpu", "gpu"], default="auto", help="default: auto"
        )

    def add_data(self) -> None:
        """Add where the data are now, if not where the run found them.

        These are ``root``, ``file``, ``mirror`` and ``download``, each None if it was not named.
        """
        add = self.add_argument
        add("--data-root", dest="root", metavar="DIR", help="their folder")
        add("--data-file", dest="file", metavar="FILE", help="their file, if it is one")
        add("--data-mirror", dest="mirror", metavar="URL", help="download from here")
        add("--download", action=argparse.BooleanOptionalAction, help="or never do")


def expand_home(word: str) -> str:
    """A word of a command line; of ``--data-root=~/data`` with the home directory, as typed apart.

    Shells expand ``~`` only where a word begins.
    """
    name, sign, value = word.partition("=")
    if name.startswith("--") and value.startswith("~"):
        return f"{name}{sign}{environment.expand_home(value, name)}"
    return word


def check_run_dir(text: str) -> Path:
    """The path, if it is the directory of a run; otherwise an error that names the newest runs."""
    try:
        if text and (Path(text) / "config.yaml").exists():
            return Path(text)
    except OSError as error:  # such as a name that is too long, or a folder that is not ours
        raise argparse.ArgumentTypeError(f"{text[:80]}: {error.strerror}") from error
    runs = sorted(Path("runs").glob("*/config.yaml"), key=lambda path: -path.stat().st_mtime)
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
