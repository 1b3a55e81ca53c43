"""Searches: many runs with other values, chosen by Optuna, and the best of them.

Promise: each trial is a run like any other; the same command continues a search that was killed,
and never starts two processes for one run. Read in this order: ``settings`` (the command line and
configs/sweep), ``search`` (the loop), ``forks`` (a trial on a CPU), ``cluster_job`` (a trial on a
cluster), ``main``.
"""
