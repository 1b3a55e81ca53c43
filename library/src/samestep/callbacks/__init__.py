"""What acts on a run while it trains.

Promise: any LightningModule resumes exactly after an interruption, without a line of its own.

Read in this order:

- ``checkpoints`` (save, link, repair), ``run_state`` (one exchange for what follows),
  ``data_resume`` (of the data), ``rng`` (random numbers), ``rank_state`` (state of each rank),
  ``hparams_on_resume`` (values that the configuration has changed), ``objects`` (what Python
  objects hold, by ``samestep.heap``) and ``stand_ins`` (objects that a module saves): the run
  resumes.
- ``slice_weighting`` (slices of unequal length), ``loss_guard``, ``machine`` (threads of virtual
  ranks), ``watchdog``, ``batch_digest`` (two batches are compared): the run stays correct.
- ``progress`` (by ``display`` the Trainer knows that there is one), ``clock``, ``pace``,
  ``trainjob`` (for Kubeflow), ``notes``: the run is observed.
- ``predictions``: tables of the test, which the Trainer does not import.
"""
