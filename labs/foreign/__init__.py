"""A matrix of foreign styles: what happens to Lightning code that knows nothing of Samestep.

``styles``: the code, one file per family. ``matrix``: runs a style through the experiments of
``samestep verify``, which judge it. ``__main__``: the command.
"""
