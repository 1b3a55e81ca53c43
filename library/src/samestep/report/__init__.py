"""Inspect runs: the summary and the page of one run, the comparison of several, the list of all.

Promise: a report never ends a run, and names damaged files. It needs no network and no torch.

Read in this order: ``files`` (what a run directory holds), ``summary`` (what a finished run
prints), ``charts`` (curves as data, which ``templates/charts.js`` draws with Plotly), ``page``
(``report.html``), ``estimates`` (means with confidence intervals), ``tables``, ``compare`` (several
runs), ``grids`` (the runs of a grid), ``wall_time`` (where the time of runs went), ``listing`` (all
runs of a folder), ``overview`` (the same for a page), ``live`` (all of this in a browser, while
runs train).
"""
