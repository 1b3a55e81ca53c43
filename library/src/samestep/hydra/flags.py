"""The flags of the command line: those of Hydra but ``--config-...``, which would take other files.

Hydra's own parser reads them again. Here is what must be known before: torch is not imported yet.
"""

import argparse
from collections.abc import Sequence

from samestep.command_line import Parser


def flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags (``help``, ``cfg``, ``multirun``, ...) and the ``overrides`` in ``argv``.

    Raises:
        ConfigError: a flag does not exist, or contradicts another.
    """
    parser = Parser("train.py", None, add_help=False)
    parser.add_argument("overrides", nargs="*")
    for flag in ("--hydra-help", "--version", "--resolve"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--package", "-p")
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--run", "-r", action="store_true")
    one_of.add_argument("--multirun", "-m", action="store_true")
    one_of.add_argument("--shell-completion", "-sc", action="store_true")
    one_of.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    one_of.add_argument("--info", "-i", const="all", nargs="?")
    flags = parser.parse(argv)
    # Hydra itself would answer these two with a traceback.
    if flags.resolve and not flags.cfg:
        parser.error("--resolve: only together with --cfg, as in --cfg job --resolve")
    if flags.shell_completion and not flags.overrides:
        parser.error("--shell-completion: add install=bash or uninstall=bash")
    return flags
