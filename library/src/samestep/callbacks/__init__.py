"""What acts on a run while it trains.

Promise: any LightningModule resumes exactly after an interruption, without a line of its own.

Read in this order:

- ``checkpoints`` (stop, save, link, repair), ``resume_order`` (of the data), ``exact`` (random
  numbers, state of each rank), ``hparams_on_resume`` (values that the configuration has changed),
  ``attributes`` with ``state_codec`` (what Python code keeps of its own): the run resumes.
- ``slice_weighting`` (slices of unequal length), ``checks`` (what is rejected), ``loss_guard``,
  ``watchdog``: the run stays correct.
- ``run_stats``, ``progress``, ``clock``: the run is observed.
"""
