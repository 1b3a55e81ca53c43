"""The two errors a user can mend. Each prints one message, without a traceback."""

import errno

FULL = errno.ENOSPC, errno.EDQUOT
FORBIDDEN = errno.EACCES, errno.EPERM, errno.EROFS


def remedy_of(error: BaseException | None) -> str:
    """What helps against an error of a disk, as in ``free some space``."""
    number = getattr(error, "errno", None)
    if number in FULL:
        return "free some space"
    if number in FORBIDDEN:
        return "get permission to write there"
    # Its text, which stands before this one, says what it is: a file in the way, a broken disk.
    return "mend that"


class ConfigError(ValueError):
    """The arguments or the configuration are invalid: exit code 2.

    The message has the value, the rule and the remedy.

    Attributes:
        first_rank: of the ranks that raise the same error, the one that prints it.
    """

    first_rank: int | None = None


class RunError(RuntimeError):
    """The run cannot continue, and the user can fix the cause: exit code 1. See its subclasses.

    The message says what has happened, and the remedy.

    Attributes:
        first_rank: of the ranks that raise the same error, the one that prints it.
        is_final: a retry cannot help, so the exit code is 2, which no launcher retries. None
            depends on the moment: it is, until the data are set up (``samestep.hydra.build``).
    """

    first_rank: int | None = None
    is_final: bool | None = None

    def __str__(self) -> str:
        """The message alone: torch puts the traceback of a loader's worker process before it."""
        text = super().__str__()
        if not text.startswith("Caught "):
            return text
        return text.rpartition(f"{type(self).__name__}: ")[2].strip()
