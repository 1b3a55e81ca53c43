"""The program ``train.py``. Imports neither torch nor Hydra until it runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from samestep.ranks import interrupts, process

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run_program(load_train: Callable[[], Callable[..., Any]]) -> NoReturn:
    """Be the program ``train.py``, and exit with its exit code.

    It answers ``--help``, checks the configuration, and then trains in this process, or starts one
    for each device.

    Args:
        load_train: imports the function that trains one run, which takes the checked configuration
            and the overrides. The import may take seconds, during which Ctrl-C ends the program at
            once.
    """

    def main() -> int:
        interrupts.interrupt_at_once()
        from samestep.hydra import main

        return main.main(load_train())

    process.run(main)


def compose_run(overrides: Sequence[str]) -> "DictConfig":
    """The checked configuration of a run with a name: its ``run_id`` is set.

    Raises:
        ConfigError: if an override is wrong.
    """
    from samestep.hydra.compose import check
    from samestep.hydra.front_end import name_run

    cfg = check(list(overrides))
    cfg.run_id = name_run(cfg)
    return cfg
