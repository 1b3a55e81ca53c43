"""The command line of a program that trains: help, checks, several processes, and grids.

Torch is imported where training begins: help and errors answer before.
"""

import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from samestep.command_line import Parser, fit_terminal
from samestep.errors import ConfigError, RunError
from samestep.hydra import multirun
from samestep.hydra.compose import check, help_text
from samestep.hydra.front_end import topology_of
from samestep.hydra.overrides import rewrite_overrides
from samestep.hydra.program import compose_run
from samestep.hydra.project import configs_folder, project_folder
from samestep.hydra.schema import OF_RUN
from samestep.plugins import starting
from samestep.ranks import environment, failure
from samestep.run import lock

Result = TypeVar("Result")
Train = Callable[[DictConfig, list[str]], object]
"""Trains one run: takes its checked configuration, whose ``run_id`` is set, and its overrides."""


def main(train: Train) -> int:
    """Check the command line; then train in this process, or start one for each device.

    Returns:
        0 finished, 1 error, 2 invalid arguments or config, 143 stopped by SIGTERM, 130 by Ctrl-C.
    """
    try:
        flags = flags_of(sys.argv[1:])
        if flags.help:
            print(fit_terminal(help_text()))
            return 0
        if flags.multirun:
            return multirun.main(flags.overrides)
        if needs_hydra(flags):
            return run_with_hydra(train, flags)
        cfg = compose_run(flags.overrides)
        num_processes = starting.num_processes(*topology_of(cfg))
        # Other ranks come when the first may have locked it.
        if environment.rank() == 0:
            lock.note_owner(Path(cfg.run_dir))
        if num_processes > 1:
            program = [str(project_folder() / "train.py"), *flags.overrides]
            starting.become_agent(program, num_processes, run_id=cfg.run_id)
    except (ConfigError, RunError) as error:
        return failure.report(error)
    return train_or_report(train, cfg, flags.overrides)


class OverrideParser(Parser):
    """A parser that knows what other programs write as an option: ``--epochs 5``."""

    def hint(self, option: str, words: Sequence[str]) -> str:
        """The override that was probably meant; without one, a flag."""
        name, has_value, value = option.lstrip("-").partition("=")
        after = words[words.index(option) + 1 :]
        if not has_value and after and "=" not in after[0]:
            value = after[0]
        override = f"{name.replace('-', '_')}={value}"
        try:
            check([override])
        except ConfigError as error:
            hint = re.search(f"did you mean .*|{OF_RUN}", str(error))
            return hint[0] if hint else super().hint(option, words)
        return f"did you mean {override}?"


def flags_of(argv: Sequence[str]) -> Namespace:
    """Hydra's flags (``help``, ``cfg``, ``multirun``, ...) and the ``overrides`` in ``argv``.

    Not ``--config-...``, which would take other files. Hydra's own parser reads them again.
    """
    parser = OverrideParser("train.py", None, add_help=False)
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


def only_shows(flags: Namespace) -> bool:
    """Whether Hydra only prints something, and trains nothing."""
    return any((flags.cfg, flags.info, flags.hydra_help, flags.version))


def needs_hydra(flags: Namespace) -> bool:
    """Whether Hydra itself must read the command line: for a flag or a setting of its own."""
    of_hydra = any(word.lstrip("+~").startswith("hydra") for word in flags.overrides)
    return any((only_shows(flags), of_hydra, flags.shell_completion))


def train_or_report(train: Train, cfg: DictConfig, overrides: list[str]) -> int:
    """Train, and report an error to the user and to torchrun. Returns the exit code."""
    environment.limit_threads()
    try:
        train(cfg, overrides)
    except Exception as error:
        return failure.report(error)
    return 0


def run_with_hydra(train: Train, flags: Namespace) -> int:
    """Check the overrides, and hand them to Hydra, for its flags and its own settings."""
    if not flags.shell_completion:  # its words are no overrides
        cfg = check(flags.overrides)
        num_processes = starting.num_processes(*topology_of(cfg))
        if num_processes > 1 and not only_shows(flags):
            raise ConfigError(
                f"hydra.*: trains in one process; leave it out with trainer.devices={num_processes}"
            )
        # Hydra must compose what has been checked.
        words = [word for word in sys.argv[1:] if word not in flags.overrides]
        sys.argv[1:] = [*words, *rewrite_overrides(flags.overrides)]

    def task(_: DictConfig) -> None:
        train_chosen(train)

    configs = str(configs_folder())
    with help_as_text():
        hydra.main(version_base="1.3", config_path=configs, config_name="train")(task)()
    return 0


@contextmanager
def help_as_text() -> Iterator[None]:
    """Let argparse of Python 3.14 take the options of Hydra 1.3.

    It reads the help of an option when the option is added. Hydra has one whose help is an object
    that becomes text when it is printed, so no program of Hydra starts there. Upstream:
    facebookresearch/hydra issue 3121, solved in Hydra 1.4.
    """
    add_argument: Any = ArgumentParser.add_argument

    def add_with_text(parser: ArgumentParser, *names: str, **options: Any) -> Any:
        if options.get("help") is not None:
            options["help"] = str(options["help"])
        return add_argument(parser, *names, **options)

    ArgumentParser.add_argument = add_with_text  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ArgumentParser.add_argument = add_argument  # type: ignore[method-assign]


def train_chosen(train: Train) -> None:
    """Train the run that Hydra has composed, from the overrides that it was given."""
    # A plus is only for Hydra; the records show what can be typed.
    overrides = [override.lstrip("+") for override in HydraConfig.get().overrides.task]
    try:
        cfg = compose_run(overrides)
    except ConfigError as error:
        sys.exit(failure.report(error))
    exit_code = train_or_report(train, cfg, overrides)
    if exit_code:
        sys.exit(exit_code)


def train_in_process(
    train: Callable[[DictConfig, Sequence[str]], Result], words: Sequence[str]
) -> Result:
    """Train in this process, such as a notebook, as ``python train.py WORDS`` does.

    Returns what ``train`` returns, and raises what it raises.
    """
    cfg = compose_run(words)
    if starting.num_processes(*topology_of(cfg)) > 1:
        raise ConfigError(
            f"trainer.devices={cfg.trainer.devices}: several processes need a terminal, and "
            "`python train.py`; here use trainer.devices=1"
        )
    environment.limit_threads()
    return train(cfg, list(words))
