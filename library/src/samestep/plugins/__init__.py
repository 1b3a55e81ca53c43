"""What looks at a run, reports of it or knows a third party; ``samestep.plugin`` loads it by name.

Promise: without any of them a run computes and saves the same.

- ``fast_step``: a shorter way through an ordinary step.
- ``preflight``: what is wrong with a machine, a network or a rank is said before the first step.
- ``provenance`` (code and machine), ``wall_time`` with ``time_file`` (seconds by cause),
  ``slow_ranks`` (for which the others wait), ``run_stats`` (metrics of any model), ``save_time``
  (against the time after SIGTERM): the run is observed.
- ``receipts`` with ``receipt_files``: steps that are repeated are compared with what they were.
"""
