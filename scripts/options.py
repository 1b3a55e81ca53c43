"""What the scripts for a run share: their options, and the model and data of the run."""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

# As in train.py: a clone needs no installation, and takes no other clone that is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from samestep.command_line import Parser, call
from samestep.errors import ConfigError
from samestep.ranks import environment, process
from samestep.run import directory


def make_parser(description: str | None) -> Parser:
    """A parser whose first argument is the directory of a run."""
    parser = Parser(Path(sys.argv[0]).name, description)
    parser.add_run_dir()
    return parser


def add_ckpt_option(parser: Parser) -> None:
    """Let the user choose a checkpoint of the run."""
    ckpts = "best, last, or one that was kept, such as epoch-0002; default: the tested one"
    parser.add_argument("--ckpt", metavar="NAME", help=ckpts)
    trust = "call whatever config.yaml of this run names; only if you trust who made it"
    parser.add_argument("--trust", action="store_true", help=trust)


def add_model_options(parser: Parser) -> None:
    """Let the user choose a checkpoint, and where its model computes."""
    add_ckpt_option(parser)
    parser.add_argument("--accelerator", choices=["auto", "cpu", "gpu"], default="auto")


def add_data_options(parser: Parser) -> None:
    """Let the user say where the data are now, if not where the run found them."""
    parser.add_argument("--data-root", dest="root", metavar="DIR", help="their folder")
    parser.add_argument("--data-file", dest="file", metavar="FILE", help="their file, if it is one")
    parser.add_argument("--data-mirror", dest="mirror", metavar="URL", help="download from here")
    parser.add_argument("--download", action=argparse.BooleanOptionalAction, help="or never do")


def load(arguments: Any) -> tuple[Any, Any]:
    """Model and data of the run. The data come from where the options say."""
    from project import load_run

    arguments.ckpt = arguments.ckpt or directory.tested_checkpoint(arguments.run_dir)
    model, data = load_run(arguments.run_dir, arguments.ckpt, trust=arguments.trust)
    set_places(data, arguments)
    return model, data


def set_places(data: Any, arguments: Any) -> None:
    """Say where the data of a run are now: ``arguments`` may have root, file, mirror and download.

    Raises:
        ConfigError: if the data have no such setting, or only the run names where to download to.
    """
    given = vars(arguments)
    if given.get("download") and given.get("root") is None and not given.get("trust"):
        raise ConfigError(
            "--download: needs --data-root DIR, the folder to download to; the run directory may "
            "be somebody else's, and then its folder is too"
        )
    for name in ("root", "file", "mirror", "download"):
        value = getattr(arguments, name, None)
        if value is None:
            continue
        if not hasattr(data, name):
            option = "--download" if name == "download" else f"--data-{name}"
            raise ConfigError(f"{option}: {type(data).__name__} of this run has no such setting")
        setattr(data, name, value)


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Call ``main`` with the arguments on the command line, as the whole program."""
    environment.limit_threads()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)  # meant for the developers of libraries
    process.run(lambda: call(lambda: main(sys.argv[1:])))
