"""Threads that read ahead, and do not keep a program from its end."""

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

PATIENCE_S = 5  # that Python's end waits for reads; those of a dead store take minutes

Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Readers:
    """Threads that call functions, in the order in which they are given.

    At its end, Python waits for all threads of a ``ThreadPoolExecutor``. For these it waits five
    seconds at most.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.num_started = 0
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        _open.add(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a thread call ``function``; what it returns or raises is in the future."""
        future: Future[Any] = Future()
        self.tasks.put((future, function, arguments))
        if self.num_started < self.num_threads:
            self.num_started += 1
            _Reader(target=_work, args=[self.tasks], daemon=True).start()
        return future

    def close(self) -> None:
        """Cancel what has not begun, and end each thread after what it does now."""
        with suppress(Empty):
            while True:
                if task := self.tasks.get_nowait():
                    task[0].cancel()
        for _ in range(self.num_started):
            self.tasks.put(None)

    __del__ = close


class _Reader(threading.Thread):
    pass


# It has only the queue, so that readers which nobody has any more are closed.
def _work(tasks: SimpleQueue[Task | None]) -> None:
    while task := tasks.get():
        future, function, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        # While it waits for the next task, it must not hold the batch of this one.
        del task, future, function, arguments


_open: WeakSet[Readers] = WeakSet()


@atexit.register
def _end() -> None:
    """Let the threads end that can: Python kills the others, and torch's code may abort then."""
    for readers in list(_open):
        readers.close()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threading.enumerate():
        if isinstance(thread, _Reader):
            thread.join(max(0, deadline - time.monotonic()))
