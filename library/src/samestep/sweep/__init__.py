"""Searches: Optuna proposes values, and each trial is a run with some of them.

Promise: each trial is a run like any other; the same command continues a search that was killed,
and never starts two processes for one run. Read in this order: ``settings`` (the command line and
configs/sweep), ``study`` (what Optuna remembers), ``search`` (the loop), ``cluster_job`` (a trial
on a cluster), ``main``. The process of a trial is that of a grid's job: ``samestep.grid``.
"""
