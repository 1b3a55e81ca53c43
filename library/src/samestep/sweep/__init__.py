"""Searches: many runs with other values, chosen by Optuna, and the best of them.

Promise: each trial is a run like any other; the same command continues a search that was killed,
and never starts two processes for one run. Read in this order: ``settings`` (the command line and
configs/sweep), ``search`` (the loop), ``forks`` (the process of a trial), ``preload`` (what all
trials on a CPU share), ``cluster_job`` (a trial on a cluster), ``main``.
"""
