"""Planted causes of a silent difference after SIGKILL, and whether receipts notice each.

``causes``: small programs, each with state that no checkpoint holds. ``program``: runs one of them,
and kills it. ``__main__``: the command.
"""
