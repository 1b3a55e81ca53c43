"""Search good values for some keys of the configuration: what ``scripts/sweep.py`` does."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import ConfigError, RunError
from samestep.node.agent import TRAIN
from samestep.ranks import environment, failure


def main(argv: Sequence[str], help_text: str, script: Path = TRAIN) -> int:
    """Run or continue a search. The exit code is 0, 1 (no trial was completed), 2, 130 or 143."""
    if {"-h", "--help"} & set(argv):
        print(help_text.strip())
        return 0
    try:
        # Optuna and torch take seconds to import, which neither the help nor a typo needs.
        from samestep.sweep.settings import read

        settings = read(argv)
        from samestep.sweep.search import Search

        exit_code = Search(settings, script).run()
        if exit_code not in (0, 1):
            name = environment.run_id()
            line = shlex.join(["python", "scripts/sweep.py", *argv])
            print(f"To continue:\n  {f'RUN_ID={name} ' if name else ''}{line}", flush=True)
        return exit_code
    except (ConfigError, RunError) as error:
        return failure.report(error)
    except OSError as error:
        what = f"{error.filename or 'the search'} cannot be written: {error.strerror}"
        return failure.report(RunError(f"{what}; make room, and repeat the command to continue"))
