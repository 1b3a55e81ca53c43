"""One node of a run: which one it is, its agent, and how the ranks of the node end.

Promise: the exit code of a node is that of the rank that failed first, and no rank outlives its
agent.

Read in this order: ``cluster_environment`` (which node this is), ``rendezvous`` (where it meets the
others), ``agent`` (starts the ranks and watches them) and ``torch_agent`` (private names of
torchrun's), ``outcome`` (how the ranks ended), ``hung_ranks`` (ends ranks that make no progress),
``requests`` (signals that ask ranks to save), ``etcd_rendezvous`` (where nodes that come and go
meet), ``pid1`` (the first process of a container), ``run_script`` (the command ``samestep run``).
No rank imports any of them: the process of a Trainer that starts ranks becomes the agent, see
``samestep.plugins.starting``.
"""
