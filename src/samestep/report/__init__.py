"""What people look at: the page of one run, the comparison of several, and the list of all.

Promise: a report never ends a run, and damaged files are named in it. It needs no network. Only
``ending`` imports torch, in a run that has it anyway.

Read in this order: ``files`` (what a run directory holds), ``charts`` (curves by matplotlib),
``page`` (``report.html``), ``ending`` (what every run leaves when it ends), ``compare`` (several
runs), ``listing`` (all runs of a folder).
"""
