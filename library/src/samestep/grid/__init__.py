"""Grids: many runs, each in processes of its own, that one command trains and continues.

Promise: the same command, after whatever interruption, trains what is missing and repeats nothing
that is finished; and several such commands at once never start two processes for one run. Read in
this order: ``job_process`` (the process of a run, and the lock that it holds), ``jobs`` (what is
known of a grid, on the disk), ``slots`` (places with processors and GPUs of their own) and
``driver`` (the loop). ``samestep.hydra.multirun`` makes a grid of a command line.
"""
