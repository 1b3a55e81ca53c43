"""One run, one directory: its records, its history and its checkpoints.

A run that is killed at any moment, or whose files are damaged, is continued by the same command;
a file that is not its own is refused. Read in this order:

1. ``directory``: a run begins, continues and finishes; ``lock`` keeps other processes out of it,
   ``changes`` says what it may change, ``summary`` what it prints, ``records`` what it writes down
   about code and machine, ``state`` how far it is.
2. ``checkpoint``: files that are written atomically; ``sidecar`` proves that each is whole, and
   ``identity`` that it belongs to this run.
3. ``history``: the metrics over time. ``store``: a copy of the run elsewhere, which the callback
   ``artifacts`` keeps up to date; ``upload``: the command that copies a run by hand. ``nodes``:
   checkpoints for nodes that do not share the directory.
4. ``files``: how a file is written whole or not at all.
"""
