"""What watches a run while it trains.

Promise: any LightningModule continues exactly after an interruption, without a line of its own.

Read in this order: ``checkpoints`` (stop, save, link, repair), ``resume_order`` (of the data),
``exact`` (random numbers, state of each rank), ``same_weights``, ``share_out``
(slices of unequal length), ``changed_values``, ``loss_guard``, ``watchdog``, ``meter``,
``progress``, ``loggers``, ``monitors`` and ``attributes`` with
``values`` (what Python code keeps of its own).
``supported`` names the callbacks of Lightning that are rejected, because a run with them cannot be
continued.
"""
