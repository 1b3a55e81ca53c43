"""The two errors a user can mend. Each prints one message, without a traceback."""


class ConfigError(ValueError):
    """The command line or a configuration file cannot be run: exit code 2."""


class RunError(RuntimeError):
    """The run cannot go on, and the user can mend the cause: exit code 1. See its subclasses."""
