"""A table of losses: which take the same steps on any number of ranks, and what a run says.

``shapes``: losses and layers as people write them, one file per family. ``program``: trains all of
them on some ranks, one after the other. ``verdict``: compares them with one rank. ``__main__``: the
command, and its table.
"""
