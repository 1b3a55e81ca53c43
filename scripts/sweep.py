"""Search good values with Optuna. Each trial is a run; the overrides are those of train.py.

python scripts/sweep.py sweep=NAME n_trials=24
python scripts/sweep.py sweep=NAME n_trials=24 trainer.max_epochs=10
python scripts/sweep.py sweep=NAME trials_at_once=4 trainer=gpu     # one GPU for each trial
RUN_ID=mine python scripts/sweep.py sweep=NAME cluster=CLUSTER callbacks.artifacts.url=s3://bucket/runs
RUN_ID=mine python scripts/sweep.py 'model.optimizer.lr=tag(log,interval(1e-4,1e-1))'

sweep            a file in configs/sweep: which keys are tried, and with which values
KEY=VALUES       choice(a,b), interval(low,high) or range(start,stop,step): Hydra's grammar
n_trials         trials in all, also failed and pruned ones; a larger number continues the search
trials_at_once   trials that run at the same time; each has its own GPUs; on a cluster it is a job
sampler, pruner  classes of Optuna, such as pruner._target_=optuna.pruners.NopPruner
overrides        of every trial; those of the command line come after them

The name of the search is RUN_ID, otherwise that of the file. Its trials are runs: runs/<name>-0 and
on. In runs/sweeps/<name> are logs/, what each has printed, and journal.log for optuna-dashboard.
The same command continues a search that was stopped or killed, and its unfinished trials. Ctrl-C
and SIGTERM stop the trials, which save first. python train.py -m trains grids.
Exit codes: 0 done, 1 no trial was completed, 2 wrong usage or config, 143 SIGTERM, 130 Ctrl-C.
"""

import sys

import options  # noqa: F401 (puts src on the path)

from samestep.ranks import process
from samestep.sweep.main import main

if __name__ == "__main__":
    process.run(lambda: main(sys.argv[1:], str(__doc__)))
