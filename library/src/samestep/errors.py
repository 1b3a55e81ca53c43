"""The two errors a user can mend. Each prints one message, without a traceback."""


class ConfigError(ValueError):
    """The arguments or the configuration are invalid: exit code 2.

    Args:
        message: the value, the rule and the remedy.
        on_all_ranks: every rank raises the same error, so only rank zero prints it.
    """

    on_all_ranks = False

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = self.on_all_ranks or on_all_ranks


class RunError(RuntimeError):
    """The run cannot continue, and the user can fix the cause: exit code 1. See its subclasses.

    Args:
        message: what has happened, and the remedy.
        on_all_ranks: every rank raises the same error, so only rank zero prints it.

    Attributes:
        is_final: a retry cannot help, so the exit code is 2, which no launcher retries. None
            depends on the moment: it is, until the data are set up (``samestep.hydra.build``).
    """

    on_all_ranks = False
    is_final: bool | None = None

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = self.on_all_ranks or on_all_ranks

    def __str__(self) -> str:
        """The message alone: torch puts the traceback of a loader's worker process before it."""
        text = super().__str__()
        if not text.startswith("Caught "):
            return text
        return text.rpartition(f"{type(self).__name__}: ")[2].strip()
