"""Searches: many runs with other values, chosen by Optuna, and the best of them.

Promise: each trial is a run like any other, with its own name and directory; a search that was
killed goes on where it was, and never starts two processes for one run. No torch here.

Read in this order: ``settings`` (the command line and configs/sweep), ``space`` (which values are
tried), ``study`` (Optuna's record of the trials), ``trial_process`` (one trial: a process and its
metrics), ``cluster_job`` (the same on a cluster), ``search`` (the loop), ``results`` (what is left
at the end), ``main``, ``command`` (its help).
"""
