"""Calls a function in a fork of this process, so that nothing it changes here remains."""

import gc
import os
import pickle
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")

OPEN_FILES = Path("/proc/self/fd")  # a link for each open file of this process


class ForkError(Exception):
    """The function raised an error, or took too long."""


class ForkTimeout(ForkError):
    """The function took too long, or its process was killed."""


class OnlyCPU(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this block no operation of torch reaches a device.

    CUDA works in no fork of a process that has used it: an operation may fail, or hang.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, if all its tensors are on the CPU."""
        named = kwargs or {}
        for value in flatten([*args, *named.values()]):
            device = value.device if isinstance(value, Tensor) else value
            if isinstance(device, torch.device) and device.type != "cpu":
                raise RuntimeError(f"a fork has no device {device.type}, which {func} needs")
        return func(*args, **named)


def flatten(arguments: Iterable[Any]) -> Iterator[Any]:
    """The arguments of an operation, some of which are lists of tensors."""
    for value in arguments:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def can_fork() -> bool:
    """Whether a fork of this process can compute.

    On macOS it cannot: Apple's libraries end a fork of a process with threads, or hang in it.
    """
    # No function says so, which is why the system is asked for its name. Without this folder a fork
    # would keep the connections of its rank.
    return sys.platform == "linux" and OPEN_FILES.is_dir()


def call_in_fork(function: Callable[[], Result], timeout_s: float) -> Result:
    """What ``function`` returns in a fork of this process; it must be possible to pickle it.

    The fork has no other ranks, no connections, one thread, no GPU, and writes to no terminal and
    no file: there ``write`` raises an OSError. It shares the positions of open files with this
    process, so the function must not read them.

    Raises:
        ForkError: if the function fails; ``ForkTimeout`` if it does not end in time.
    """
    reads, writes = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of other threads, none of which the fork has or waits for.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as reason:
        # Where memory is not overcommitted, a large process cannot be forked.
        os.close(reads)
        os.close(writes)
        raise ForkError(f"the process cannot be forked: {reason.strerror}") from reason
    if pid == 0:
        os.close(reads)
        _run(function, writes, timeout_s)
    os.close(writes)
    try:
        content = _read_all(reads, time.monotonic() + timeout_s)
    finally:
        os.close(reads)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not content:
        raise ForkTimeout(f"it did not end within {timeout_s:g} s, or was killed")
    result, error = pickle.loads(content)
    if error is not None:
        raise ForkError(error)
    value: Result = result
    return value


def _read_all(pipe: int, deadline: float) -> bytes:
    """All that is written to a pipe; nothing if it is not complete in time."""
    parts: list[bytes] = []
    while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(pipe, 2**20)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""


def _run(function: Callable[[], Any], pipe: int, timeout_s: float) -> None:
    """Be the fork, which ends here."""
    try:
        # The parent may be killed: without it nothing else would end this process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        # A collection writes to every object, and so would copy all memory of the parent.
        gc.disable()
        # What the user's code writes to its own files would be there twice. Pipes have no limit.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        # The other threads of a pool do not exist here, and an operation would wait for them.
        torch.set_num_threads(1)
        _close_connections()
        try:
            _leave_ranks()
            with OnlyCPU():  # type: ignore[no-untyped-call]
                answer: tuple[Any, str | None] = function(), None
        except BaseException as error:  # whatever a model raises, also to end its process
            answer = None, f"{type(error).__name__}: {error}"
        content = pickle.dumps(answer)
        while content:
            content = content[os.write(pipe, content) :]
    finally:
        # No clean-up of the parent's: its files, threads and connections are not ours.
        os._exit(0)


def _leave_ranks() -> None:
    """Forget the process group, whose connections belong to the parent; torch 2.15."""
    if dist.is_available() and dist.is_initialized():
        dist.distributed_c10d.GroupMember.WORLD = None


def _close_connections() -> None:
    """Close what would let this process talk in the place of its rank, such as to a tracker."""
    for link in OPEN_FILES.iterdir():
        # The folder itself was open while it was read.
        with suppress(OSError):
            if str(link.readlink()).startswith("socket:"):
                os.close(int(link.name))
