"""What people look at: the end and the page of one run, the comparison of several, the list of all.

Promise: a report never ends a run, and damaged files are named in it. It needs no network, and no
torch.

Read in this order: ``summary`` (what a finished run prints), ``files`` (what a run directory
holds), ``charts`` (curves by matplotlib), ``page`` (``report.html``), ``compare`` (several runs),
``listing`` (all runs of a folder), ``commands`` (``samestep report``, ``compare`` and ``runs``).
"""
