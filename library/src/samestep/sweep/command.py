"""Search good values with Optuna. Each trial is a run; the overrides are those of train.py.

samestep sweep sweep=NAME n_trials=24
samestep sweep sweep=NAME n_trials=24 trainer.max_epochs=10
samestep sweep sweep=NAME trials_at_once=4 trainer=gpu     # one GPU for each trial
RUN_ID=mine samestep sweep sweep=NAME cluster=CLUSTER callbacks.artifacts.url=s3://bucket/runs

sweep            a file in configs/sweep: which keys are tried, and with which values
n_trials         trials in all, also failed and pruned ones; a larger number continues the search
trials_at_once   trials that run at the same time; each has its own GPUs; on a cluster it is a job
storage          an address of Optuna, such as postgresql://host/db; null: a file in the folder
sampler, pruner  of Optuna, such as pruner._target_=optuna.pruners.NopPruner
shared_run_root  true: run_root is the same folder here and in the pods of a cluster
overrides        of every trial; those of the command line come after them

The name of the search is RUN_ID, otherwise that of the file. Everything is in runs/sweeps/<name>:
the runs, the output of each in logs/, search.html with Optuna's plots, and best.yaml. The same
command continues a search that was stopped or killed, and its unfinished trials. Ctrl-C and SIGTERM
stop the trials, which save first. python train.py -m trains grids.
Exit codes: 0 done, 1 no trial was completed, 2 wrong usage or config, 143 SIGTERM, 130 Ctrl-C.
"""

from collections.abc import Sequence

from samestep.sweep.main import main as search


def main(argv: Sequence[str]) -> int:
    """Search, and return the exit code."""
    return search(argv, str(__doc__))
