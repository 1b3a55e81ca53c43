"""What the command lines of the scripts for a run share. Imports no torch."""

import argparse
import difflib
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As in train.py: a clone needs no installation, and takes no other clone that is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, secrets
from samestep.run import state


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose first argument is the directory of a run."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=style)
    # "?" with a default: a missing argument is then reported by `check_run_dir` too.
    parser.add_argument("run_dir", nargs="?", default="", type=check_run_dir, help="runs/<id>")
    return parser


def add_ckpt_option(parser: argparse.ArgumentParser) -> None:
    """Let the user choose a checkpoint of the run."""
    ckpts = "best, last, or one that was kept, such as epoch-0002; default: the one that was tested"
    parser.add_argument("--ckpt", metavar="NAME", help=ckpts)
    trust = "call whatever config.yaml of this run names: it is yours, or of somebody you trust"
    parser.add_argument("--trust", action="store_true", help=trust)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Let the user choose a checkpoint, and where its model computes."""
    add_ckpt_option(parser)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Let the user say where the data are now, if not where the run found them."""
    parser.add_argument("--data-root", dest="root", type=Path, metavar="DIR", help="their folder")
    parser.add_argument("--data-file", dest="file", metavar="FILE", help="their file, if it is one")
    parser.add_argument("--data-mirror", dest="mirror", metavar="URL", help="download from here")
    parser.add_argument("--download", action=argparse.BooleanOptionalAction, help="or never do")


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


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> Any:
    """The arguments on the command line. An unknown one ends the program with exit code 2."""
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        names = re.findall(r"--[a-z-]+", parser.format_help())
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help lists all"
        parser.error(f"{unknown[0]}: no such option; {hint}")
    return arguments


def load(arguments: Any) -> tuple[Any, Any]:
    """Model and data of the run. The data come from where the options say."""
    from project import load_run
    from samestep.hydra.saved_run import set_places  # imports torch

    arguments.ckpt = arguments.ckpt or state.tested_checkpoint(arguments.run_dir)
    model, data = load_run(arguments.run_dir, arguments.ckpt, trust=arguments.trust)
    set_places(data, arguments)
    return model, data


def run(main: Callable[[Any], int], arguments: Any) -> int:
    """Call ``main``; an error becomes one message on stderr, and exit code 2 (usage) or 1."""
    environment.limit_threads()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)  # meant for the developers of libraries
    try:
        return main(arguments)
    except (ConfigError, RunError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        print(f"error: {secrets.redact(text)}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
