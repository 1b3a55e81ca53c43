"""The two errors a user can mend. Each prints one message, without a traceback."""


class ConfigError(ValueError):
    """The command line or a configuration file cannot be run: exit code 2.

    Attributes:
        on_all_ranks: every rank raises the same error, so only rank zero prints it.
    """

    on_all_ranks = False


class RunError(RuntimeError):
    """The run cannot go on, and the user can mend the cause: exit code 1. See its subclasses.

    Attributes:
        on_all_ranks: every rank raises the same error, so only rank zero prints it.
        is_final: trying again cannot help, so the exit code is 2, which no launcher retries.
    """

    on_all_ranks = False
    is_final = False
