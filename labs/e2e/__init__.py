"""Runs on the cluster that kubectl reaches: ``test_runs``, with the fixture of ``conftest``.

``cluster`` speaks with the cluster. ``__main__`` is the command.
"""
