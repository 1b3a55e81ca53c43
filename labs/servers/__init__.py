"""Real servers of Kubernetes, on which the tests in tests/labs/servers try what a run submits.

``build.sh`` builds them, with ``control_plane`` and ``slow.go``. ``start`` starts them, with the
pods of ``nodes``. ``__main__`` is the command.
"""
