"""The configuration: composed, checked, rejected with one clear message, and made into objects.

Promise: invalid arguments end with exit code 2 and one message within a second, and leaves
nothing behind.

Read in this order: ``compose`` (files and overrides become one configuration), ``schema`` (keys and
types, compared with the files), ``rules`` (ranges, choices) and ``project`` (its folder), which
need no torch; then ``adapter`` (name and facts of the run), ``build`` (models, data, callbacks),
``targets`` (what a saved run may call), ``saved_run`` (model and data of a run, read back and
tested again) and ``main`` (the command line of a program that trains, from its arguments to its
exit code).
"""
