"""One node of a run: which one it is, its agent, and how the ranks of the node end.

Promise: the exit code of a node is that of the rank that failed first, and no rank outlives its
agent.

Read in this order: ``cluster_environment`` (which node this is), ``rendezvous`` (where it meets the
others), ``agent`` (starts the ranks and watches them), ``outcome`` (how they ended), ``requests``
(signals that ask them to save), ``etcd_rendezvous`` (where nodes that come and go meet), ``pid1``
(the first process of a container), ``run_script`` (the command ``samestep run``). No rank imports
any of them: the process of a Trainer that starts ranks becomes the agent, see
``samestep.ranks.starting``.
"""
