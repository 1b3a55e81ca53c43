"""The two errors a user can mend. Each prints one message, without a traceback."""


class ConfigError(ValueError):
    """The command line or a configuration file cannot be run: exit code 2."""

    on_all_ranks = False  # whether every rank raises the same error, so that one may print it


class RunError(RuntimeError):
    """The run cannot go on, and the user can mend the cause: exit code 1. See its subclasses."""

    on_all_ranks = False
