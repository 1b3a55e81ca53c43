"""The flags of the command line: Hydra's own ones, less those that a run does not take."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from samestep.errors import ConfigError

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
COMPLETION = ("install=", "uninstall=", "query=")


class _Parser(argparse.ArgumentParser):
    """A parser that raises a ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; python train.py --hydra-help lists all flags")


def flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags (``help``, ``cfg``, ``multirun``, ...) and the ``overrides`` in ``argv``.

    Raises:
        ConfigError: a flag does not exist, stands between overrides, or contradicts another.
    """
    parser = _parser()
    if "--" in argv:
        parser.error("--: is no flag; write the overrides without it")
    flags = parser.parse_args(argv)
    if flags.config_path or flags.config_name or flags.config_dir:
        parser.error("--config-...: leave it out; a run is made of configs/train.yaml only")
    if sum(map(bool, (flags.run, flags.multirun, flags.cfg, flags.info))) > 1:
        parser.error("--run, --multirun, --cfg and --info exclude each other")
    if flags.resolve and not (flags.cfg or flags.help):
        parser.error("--resolve: only together with --cfg, as in --cfg job --resolve")
    if flags.shell_completion and not any(w.startswith(COMPLETION) for w in flags.overrides):
        parser.error("--shell-completion: add install=bash or uninstall=bash")
    return flags


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--version", action="version", version=f"Hydra {version('hydra-core')}")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--run", "-r", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--info", "-i", const="all", nargs="?", choices=INFO)
    return parser
