"""The configuration: composed, checked, and refused with one clear message. No torch here.

Promise: a wrong command line ends with exit code 2 and one message within a second, and leaves
nothing behind.

Read in this order: ``flags`` (what is no override), ``compose`` (files and overrides become one
configuration), ``schema`` (keys and types, compared with the files), ``rules`` (ranges, choices),
``run_spec`` (the facts of a run for all other parts).
"""
