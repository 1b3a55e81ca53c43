"""The objects of a program: what they hold, and how a later process gives it back to them.

Promise: what can be reached from a few roots, and training changes, is given back to the same
objects in the next process, and no code that a file names is run.

Read in this order: ``kinds`` (what an object holds, by its class), ``stream`` (the bytes), ``heap``
(names, and what has changed), ``hyperparameters`` (what config.yaml holds of an object).
"""
