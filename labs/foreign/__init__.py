"""A matrix of foreign styles: what happens to Lightning code that knows nothing of Samestep.

``styles``: the code, one file per family. ``watcher``: records a run, and interrupts it.
``matrix``: runs a style through the columns, and judges each. ``__main__``: the command.
"""
