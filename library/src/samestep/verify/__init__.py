"""``samestep verify``: run the user's own command several times, harm it, and compare.

Promise: nothing of the user's runs is read, locked or written, and no tracker or store is called.

Read in this order: ``main`` (the command line and the table), ``experiments`` (what is started, how
it is harmed, and what it is compared with), ``program`` (one process and what it printed),
``plan`` (what it must do), ``changes`` (to the arguments of ``samestep.Trainer``), ``recorder``
(the callback within it), ``records`` (what that has written), ``compare`` (the first difference),
``known_notes`` (which differences a note of the run explains), ``hints`` (what to look for).
"""
