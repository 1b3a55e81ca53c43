"""One run, one directory: its record, its history and its checkpoints.

The same command resumes a run that was killed at any moment, or whose files are damaged; files of
another run are rejected. Read in this order:

1. ``layout``: the files of a run directory. ``lifecycle``: starts, resumes and finishes a run.
   ``lock`` keeps other processes out, ``changes`` compares the configuration with the saved one,
   ``record`` is run.json, ``logs`` are the ranks', ``phases`` what this process does now.
2. ``checkpoint``: files that are written atomically, by a thread of ``background``. ``manifest``
   proves a checkpoint intact and of this run. ``weights`` says whether those of a checkpoint fit a
   model. ``save_interval`` says when to save, and ``phases`` what a process does.
3. ``history`` writes the metrics over time, ``metrics`` reads them. ``copies`` is what a run asks
   of a callback that copies it elsewhere, and of nodes that do not share its directory. ``store``
   is such a copy: the callback ``artifacts`` keeps it up to date, ``upload`` makes it by command.
4. ``files``: writes a file completely or not at all.
"""
