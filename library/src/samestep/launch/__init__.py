"""Sending a run to a cluster, and being one node of it.

Promise: the same command runs on every cluster; a value that breaks a run is found before a cluster
sees it; the exit code of a container is that of the run.

To send a run, read in this order:

1. ``main``: what each command does. ``render``: fills the files of k8s/; ``patch``: adds what the
   user's cluster needs beside them.
2. ``check``: finds the values that break a run on a cluster.
3. ``ownership``: whose an object of a cluster is. ``kubernetes`` with ``dry_run`` (what the
   cluster would say), ``creation`` (all objects or none), ``kubectl``, ``explain``, ``volume``,
   ``follow`` and ``kubeflow``; ``slurm``; ``poll``, the loop in which both wait; ``commands``, for
   every other cluster.
4. ``submissions``: finds a run by its name.

To be a node: ``entrypoint``, above ``samestep.node``; ``starts`` ends a run that comes no further.
"""
