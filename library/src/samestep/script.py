"""What a script of a project does around its ``main``."""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from samestep import command_line
from samestep.hydra.project import add_project
from samestep.ranks import environment, failure, process


def run_script(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Call ``main`` with the arguments of the process, and exit with what it returns.

    It may import the code of the project. A ConfigError or RunError ends with one message, and exit
    code 2 or 1.

    Args:
        main: takes the arguments, without the name of the script, and returns the exit code.
    """
    # In a container a script is process 1, for which SIGTERM does nothing without a handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(failure.EXIT_SIGTERM))
    environment.limit_threads()
    command_line.print_results_only()

    def call_main() -> int:
        add_project()
        return main(sys.argv[1:])

    process.run(lambda: command_line.call(call_main))
