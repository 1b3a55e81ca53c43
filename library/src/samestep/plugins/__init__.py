"""What looks at a run, reports of it or knows a third party; ``samestep.plugin`` loads it by name.

Promise: a run that asks for none of them computes and saves the same without them.

- ``fast_step``: a shorter way through an ordinary step.
- ``preflight``: what is wrong with a machine, a network or a rank is said before the first step.
- ``fsdp`` with ``shards`` (its files): a part of the model on each rank, for ``strategy="fsdp"``.
- ``receipts`` with ``receipt_files``: steps that are repeated are compared with what they were.
- ``replication``: checkpoints for nodes that do not share the directory.
- ``slurm``: SIGUSR1 queues the job again.
- ``trackers``: Lightning's loggers for TensorBoard, CSV, W&B and MLflow.
"""
