"""How a rank reports the error that ends it: to the user, and to torchrun's agent.

Under torchrun each rank has an error file (``TORCHELASTIC_ERROR_FILE``). torchrun's agent reads in
it why the rank failed: ``ChildFailedError.failures[rank].message``. This is the format of
``torch.distributed.elastic.multiprocessing.errors``, written without importing torch.
"""

import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from samestep.errors import ConfigError, RunError
from samestep.ranks import environment, interrupts
from samestep.ranks.secrets import redact

EXIT_ERROR, EXIT_CONFIG = 1, 2
EXIT_SIGTERM = 128 + signal.SIGTERM  # 143: stopped after saving
EXIT_REQUEUED = 128 + signal.SIGUSR1  # 138: stopped after saving, and Slurm starts the job again
ASKS = {signal.SIGUSR1, signal.SIGUSR2}  # signals that ask a run to save
PREFIX = "error: "  # begins the message of an error that the user can mend
BY_AGENT = -1  # in place of the rank that prints an error
LOST = "has lost its connection to another rank"

# What gloo and NCCL say when the process at the other end of a connection has ended.
LOST_CONNECTION = re.compile(
    r"gloo.*(closed by peer|reset by peer|Broken pipe)|ncclRemoteError", re.DOTALL
)


class LostOtherRank(Exception):
    """A connection to another rank broke, and no rank has left an error: one was perhaps killed."""

    def __init__(self) -> None:
        super().__init__(
            f"rank {environment.rank()} {LOST}, which has ended without leaving an error"
        )


class OtherRankFailed(Exception):
    """Another rank failed first, and has printed why; this rank ends with its exit code."""

    def __init__(self, message: str, code: int, first_rank: int) -> None:
        super().__init__(message)
        self.exit_code = code
        self.first_rank = first_rank


def may_be_of_connection(error: BaseException) -> bool:
    """Whether gloo or NCCL may have raised this: their errors have no type of their own."""
    return isinstance(error, RuntimeError) and not isinstance(error, RunError)


def is_lost_connection(error: BaseException) -> bool:
    """Whether gloo or NCCL has raised this, because the process of another rank has ended."""
    return may_be_of_connection(error) and bool(LOST_CONNECTION.search(str(error)))


def report(error: Exception) -> int:
    """Print an error once, leave it for torchrun's agent, and return the exit code.

    A ``ConfigError``, a ``RunError`` or ``LostOtherRank`` is one message. ``OtherRankFailed`` is
    printed by the other rank. Any other error is a traceback.
    """
    record(error)
    if printing_rank(error) == environment.rank():
        print(redact(describe(error)), file=sys.stderr, flush=True)
    return exit_code(error)


def printing_rank(error: Exception) -> int:
    """The rank that prints the error, or ``BY_AGENT``."""
    # Of an error that several ranks have raised, process_group knows the first of them.
    first_rank: int | None = getattr(error, "first_rank", None)
    if first_rank is not None:
        return first_rank
    if not isinstance(error, ConfigError):
        return environment.rank()
    # Until the ranks meet, those of a node raise the same ConfigError. The agent ends all of them
    # when one has ended, perhaps before a certain rank has printed it.
    if environment.has_our_agent():
        return BY_AGENT
    return environment.rank() - environment.local_rank()


def describe(error: Exception) -> str:
    """The text to print: one message if the user can mend the error, otherwise a traceback."""
    text = message(error)
    if isinstance(error, LostOtherRank):
        return f"{PREFIX}{text}"
    if text.startswith(PREFIX):
        return text
    return "".join(traceback.format_exception(error)).rstrip()


def exit_code(error: Exception) -> int:
    """2 if trying again cannot help, otherwise 1; or that of the rank that failed first."""
    if isinstance(error, OtherRankFailed):
        return error.exit_code
    if isinstance(error, ConfigError):
        return EXIT_CONFIG
    # A RunError can be final as well: data that are missing stay missing.
    if getattr(error, "is_final", False):
        return EXIT_CONFIG
    return EXIT_ERROR


def record(error: Exception) -> None:
    """Leave the error for torchrun's agent, if there is one; the first error of a rank counts.

    Call it as early as possible: once this rank's connections close, other ranks fail too.
    """
    name = environment.variable("TORCHELASTIC_ERROR_FILE")
    if not environment.under_torchrun() or name is None:
        return
    # An error while this one is handled would replace the cause.
    if Path(name).exists():
        return
    now = time.time_ns()
    extra = {
        "timestamp": str(now // 10**9),
        "time_ns": now,
        "printing_rank": printing_rank(error),
    }
    text = json.dumps({"message": {"message": redact(message(error)), "extraInfo": extra}})
    # The agent reads the file when this process ends, at any moment: it must be complete by then.
    partial = Path(f"{name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(name)
    except OSError as reason:
        print(f"{name} cannot be written: {reason.strerror}", file=sys.stderr)


def message(error: Exception) -> str:
    """The error as one message: ``error: ...`` if the user can mend it, otherwise its type too."""
    if isinstance(error, (LostOtherRank, OtherRankFailed)):
        return str(error)
    if isinstance(error, (ConfigError, RunError)):
        return f"{PREFIX}{error}"
    return traceback.format_exception_only(error)[-1].strip()


class ErrorHook:
    """A ``sys.excepthook``: an error that the user can mend is one line, and has its exit code.

    Args:
        before: the hook of the program, which shows all other errors.
    """

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    @classmethod
    def install(cls) -> None:
        """Install this hook in front of the current ``sys.excepthook``, once."""
        if not isinstance(sys.excepthook, cls):
            sys.excepthook = cls(sys.excepthook)

    def __call__(
        self, kind: type[BaseException], error: BaseException, frames: TracebackType | None
    ) -> None:
        """Report the error that ends this process."""
        known = (ConfigError, RunError, LostOtherRank, OtherRankFailed)
        if isinstance(error, known):
            # Python takes the exit code from a SystemExit that a hook raises.
            raise SystemExit(report(error))
        if isinstance(error, KeyboardInterrupt) and passes_through_us(frames):
            interrupts.say_interrupted()
            raise SystemExit(interrupts.EXIT_INTERRUPTED)
        if isinstance(error, Exception):
            record(error)
        self.before(kind, error, frames)


def passes_through_us(frames: TracebackType | None) -> bool:
    """Whether an error has come out of code of this library, such as the constructor of Trainer."""
    folder = str(Path(__file__).parents[1])
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(frames)]
    return any(file.startswith(folder) for file in files)
