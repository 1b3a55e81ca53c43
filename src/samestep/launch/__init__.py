"""Sending a run to a cluster, and being one node of it.

Promise: the same command runs on every cluster; a mistake is found before a cluster sees it; the
exit code of a container is that of the run.

Read in this order, to send a run: ``main``, ``local_settings`` (configs/local), ``render`` (the
files of k8s/ with values), ``check`` (mistakes), ``kubernetes`` with ``kubectl`` and
``kubectl_errors``, ``volume``, ``follow``, ``kubeflow``, ``slurm`` with ``slurm_errors``,
``submitted`` (how a run is found by its name). ``image`` builds what runs there.
To be a node: ``entrypoint``, ``cluster_environment``, ``pid1``, ``agent``, ``outcome``,
``hung_ranks``, ``etcd_rendezvous``.
"""
