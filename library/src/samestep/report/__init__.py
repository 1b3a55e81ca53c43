"""What people look at: the page of one run, the comparison of several, and the list of all.

Promise: a report never ends a run, and damaged files are named in it. It needs no network, and no
torch.

Read in this order: ``files`` (what a run directory holds), ``charts`` (curves by matplotlib),
``page`` (``report.html``), ``compare`` (several runs), ``listing`` (all runs of a folder),
``commands`` (``samestep report``, ``compare`` and ``runs``).
"""
