"""What looks at a run, reports of it or knows a third party; ``samestep.plugin`` loads it by name.

Promise: without any of them a run computes and saves the same.

- ``compiled_code``: what torch.compile has made lies beside the checkpoint.
- ``divided_batches``: finds data that are divided by the number of ranks twice, or not at all.
- ``fast_step``: a shorter way through an ordinary step.
- ``loss_check`` with ``step_probe`` (computes a step), ``samples`` (of a batch of any kind) and
  ``forked`` (leaves no trace): names what would make other steps on several ranks.
- ``monitor_check``: rejects a monitor that validation does not log, before training begins.
- ``needed_names``: rejects versions of torch and Lightning that lack what a run needs.
- ``notices``: saves at once when the machine will be taken away.
- ``preflight``: what is wrong with a machine, a network or a rank is said before the first step.
- ``receipts`` with ``receipt_files``: steps that are repeated are compared with what they were.
"""
