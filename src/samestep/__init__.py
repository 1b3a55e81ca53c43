"""Samestep: the same steps on any number of ranks, before and after any interruption.

You never edit this package; a newer version of the template replaces it. What you own is in
``src/project``. Read in this order: ``errors``, ``config``, ``ranks``, ``data``, ``run``,
``callbacks``, ``report``, ``build``, ``targets``, ``ending``, ``shares``, ``launch``, ``sweep``.
Each folder opens with what it promises.
"""
