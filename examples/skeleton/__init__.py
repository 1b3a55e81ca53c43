"""The smallest model and data that keep every promise; a copy without a task starts from them.

Read in this order: ``data`` (from numbers to batches), ``model`` (the net, its loss and optimizer).
"""
