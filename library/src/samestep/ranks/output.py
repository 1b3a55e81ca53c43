"""Output that cannot end a process: the reader of stdout, a terminal or a disk may go away."""

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any


def make_streams_safe() -> None:
    """Let nothing that is printed end this process; a replaced stdout or stderr stays as it is."""
    sys.stdout = _safe(sys.stdout, sys.__stdout__, 1)
    sys.stderr = _safe(sys.stderr, sys.__stderr__, 2)


def say(text: str) -> None:
    """Print a line at once: a run that is killed later has said it."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        print(text, flush=True)
        return
    # A bar of tqdm leaves the cursor at its end. This writes above all bars that are open.
    tqdm.tqdm.write(text)
    sys.stdout.flush()


def drop_lost_terminal() -> None:
    """Write nowhere what would go to a terminal that was closed; a SIGHUP may say so.

    Not every stream is one of ``make_streams_safe``: a script may have replaced it before.
    """
    for descriptor in (1, 2):
        if has_hung_up(descriptor):
            drop_output(descriptor)


def has_hung_up(descriptor: int) -> bool:
    """Whether the other end of a pipe or a terminal has gone; nothing is written to find out."""
    # Python leaves it out where the one of macOS does not work: then the next write finds out.
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_output(descriptor: int) -> None:
    """Make ``/dev/null`` of an open file."""
    # The same descriptor, so that libraries in C and child processes write there too.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


class _Output(io.FileIO):
    """A file descriptor that becomes ``/dev/null`` when it can no longer be written."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise  # the reader is only slow
        except OSError:
            drop_output(self.fileno())
            return len(data)


def _safe(stream: Any, original: Any, descriptor: int) -> Any:
    """Return a stream that cannot fail for stdout or stderr."""
    if stream is not original:
        return stream  # a test or a notebook has replaced it
    encoding, write_through = "utf-8", False
    # Python has no stream for a descriptor that was closed when it started.
    if stream is not None:
        # What was printed before, which comes first. At its end Python would print it, or fail.
        with suppress(OSError):
            stream.flush()
        encoding, write_through = stream.encoding, stream.write_through
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(descriptor, "wb", closefd=False)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
        write_through=write_through,
    )
