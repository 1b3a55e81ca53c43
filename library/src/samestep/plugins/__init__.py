"""What looks at a run, reports of it or knows a third party; ``samestep.plugin`` loads it by name.

Promise: a run that asks for none of them computes and saves the same without them.

- ``checks``: rejects what could not resume exactly, or would be wrong without anybody noticing.
- ``compiled_code``: what torch.compile has made lies beside the checkpoint.
- ``data_of_ranks``: says what several ranks do with the training data.
- ``epoch_means``: the mean over the epoch of what a module logs per step only.
- ``fast_step``: a shorter way through an ordinary step.
- ``loss_check``: names what would make other steps on several ranks.
- ``measured_shares``: ranks of unequal machines get unequal slices.
- ``monitor_check``: rejects a monitor that validation does not log, before training begins.
- ``needed_names``: rejects versions of torch and Lightning that lack what a run needs.
- ``notices``: saves at once when the machine will be taken away.
- ``preflight``: what is wrong with a machine, a network or a rank is said before the first step.
- ``fsdp`` with ``shards`` (its files): a part of the model on each rank, for ``strategy="fsdp"``.
- ``provenance`` (code and machine), ``wall_time`` with ``time_file`` (seconds by cause),
  ``slow_ranks`` (for which the others wait), ``run_stats`` (metrics of any model), ``save_time``
  (against the time after SIGTERM): the run is observed.
- ``receipts`` with ``receipt_files``: steps that are repeated are compared with what they were.
- ``replication``: checkpoints for nodes that do not share the directory.
- ``slurm``: SIGUSR1 queues the job again.
- ``starting`` with ``device_option`` (what ``devices`` means): how a Trainer starts ranks.
- ``trackers``: Lightning's loggers for TensorBoard, CSV, W&B and MLflow.
"""
