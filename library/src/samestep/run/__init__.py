"""One run, one directory: its record, its history and its checkpoints.

A run that is killed at any moment, or whose files are damaged, is continued by the same command;
a file that is not its own is rejected. Read in this order:

1. ``layout``: the files of a run directory. ``lifecycle``: a run begins, continues and finishes;
   ``lock`` keeps other processes out of it,
   ``changes`` compares its configuration, ``record`` is what it records of itself, with the code
   and machine that ``provenance`` finds; ``logs`` is what its ranks log.
2. ``checkpoint``: files that are written atomically; ``manifest`` proves that each is whole, and
   that it belongs to this run; ``shards``: the tensors of a model that is sharded.
3. ``history``: the metrics over time, which ``metrics`` reads. ``store``: a copy of the run
   elsewhere, which the callback ``artifacts`` keeps up to date, and ``upload`` makes by hand.
   ``replication``: checkpoints for nodes that do not share the directory.
4. ``files``: how a file is written whole or not at all.
"""
