"""The ranks of a run: how they meet, what they must agree on, and how they stop together.

Promise: an error on one rank ends all ranks with one message, and a signal to one rank stops all
ranks between the same two steps.

Read in this order: ``environment`` (who am I), ``process_table`` and ``process_tree`` (other
processes), ``network`` (addresses and interfaces), ``collectives`` (which backend takes a tensor),
``process_group`` (meet, decide together), ``meeting`` (how to reach rank zero), ``run_dirs`` (one
run directory for all of them), ``virtual`` (a step has the same bits on any number of ranks),
``epoch_sums`` (what each rank adds up), ``devices`` and
``gradients`` (what a GPU computes, and nothing waits for), ``strategies`` and ``ddp`` (how
Lightning trains on these ranks), ``stopping``, ``child_signals`` (signals and other requests),
``heartbeat`` (progress), ``failure``, ``interrupts``, ``output`` and ``process`` (errors, output,
exit codes), ``secrets`` (never printed), ``epoch_logs`` (logged values over the ranks) and
``compat`` (private names of other libraries that no file alone needs).
"""
