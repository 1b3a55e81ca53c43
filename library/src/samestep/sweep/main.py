"""Search for good values with Optuna. Each trial is a run; the overrides are those of train.py.

samestep sweep sweep=NAME n_trials=24
samestep sweep sweep=NAME trials_at_once=4 trainer=gpu     # one GPU for each trial
RUN_ID=mine samestep sweep 'model.optimizer.lr=tag(log,interval(1e-4,1e-1))'
RUN_ID=mine samestep sweep sweep=NAME cluster=CLUSTER callbacks.artifacts.url=s3://bucket/runs

sweep            a file in configs/sweep: which keys are tried, and with which values
KEY=VALUES       choice(a,b), interval(low,high) or range(start,stop,step): Hydra's grammar
n_trials         trials in all, also failed and pruned ones; a larger number continues the search
trials_at_once   trials that run at the same time; each has its own GPUs; on a cluster it is a job
sampler, pruner  of Optuna, such as pruner._target_=optuna.pruners.NopPruner
overrides        of every trial; those of the command line come after them

The name of the search is RUN_ID, otherwise that of the file. Its trials are runs: runs/<name>-0 and
so on. runs/sweeps/<name> has logs/ with the output of each, and journal.log for optuna-dashboard.
The same command continues a search that was stopped or killed, and its unfinished trials. Ctrl-C
and SIGTERM stop the trials, which save first. python train.py -m trains grids.
Exit codes: 0 done, 1 no completed trial, 2 invalid arguments or config, 143 SIGTERM, 130 Ctrl-C.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import RunError, remedy_of
from samestep.ranks import environment


def main(argv: Sequence[str], script: Path | None = None) -> int:
    """Run or continue a search, and return the exit code; ``script`` stands for ``train.py``.

    Raises:
        ConfigError: if the search cannot be run.
        RunError: if its folder cannot be written.
    """
    # Not at the top: `samestep sweep --help` needs neither Optuna nor Hydra.
    from samestep.sweep.settings import read

    try:
        settings = read(argv)
        # Importing Optuna and torch takes seconds, and an error in the arguments should not.
        from samestep.sweep.search import Search

        exit_code = Search(settings, script).run()
    # The journal, a log, or the lock of the search: Optuna's own traceback would hide which.
    except OSError as error:
        what = f"{error.filename or 'the search'} cannot be written: {error.strerror}"
        raise RunError(f"{what}; {remedy_of(error)}, and repeat the command to continue") from error
    was_stopped = exit_code not in (0, 1)
    if was_stopped:
        command = shlex.join(["samestep", "sweep", *argv])
        if run_id := environment.run_id():
            command = f"RUN_ID={run_id} {command}"
        print(f"To continue:\n  {command}", flush=True)
    return exit_code
