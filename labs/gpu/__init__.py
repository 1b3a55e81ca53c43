"""The checks of a machine with GPUs: ``samestep verify --gpu`` on many settings of the template.

Read in this order: ``__main__``.
"""
