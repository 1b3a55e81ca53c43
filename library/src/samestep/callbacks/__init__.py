"""What watches a run while it trains.

Promise: any LightningModule continues exactly after an interruption, without a line of its own.

Read in this order: ``stop`` (between two steps), ``exact`` with ``sums`` (random numbers, order,
state of each rank), ``share_out`` (slices of unequal length), ``last_checkpoint``,
``best_checkpoint`` and ``epoch_checkpoints``, ``changed_values``, ``same_weights``, ``loss_guard``,
``watchdog``, ``epoch_times``, ``run_state``, ``progress``, ``loggers``, ``step_log``, ``monitors``
and ``lost_state``.
``supported`` names the callbacks of Lightning that are rejected, because a run with them cannot be
continued.
"""
