"""One run, one directory: its name, its records, its history and its checkpoints.

Promise: a process that is killed at any moment leaves files that are whole, and the same command
continues from them. A checkpoint that is damaged, or of another run or role, is never used.

Read in this order: ``name``, ``directory`` (begin, finish), ``changes`` (may this run continue),
``records`` and ``history``, ``checkpoint`` with ``sidecar``, ``identity`` and ``files``,
``summary``, ``artifacts`` (a copy in a store).
"""
