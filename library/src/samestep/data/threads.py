"""Threads that read ahead, and do not delay the end of the program."""

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

PATIENCE_S = 5  # how long Python's end waits for reads; a dead store would take minutes

Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class ReadAheadPool:
    """Threads that call functions, in the order in which they are submitted.

    At its end, Python waits for all threads of a ``ThreadPoolExecutor``, and at most five seconds
    for these.
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
        # Threads start one by one, so that a pool that is never used has none.
        if self.num_started < self.num_threads:
            self.num_started += 1
            _Reader(target=_work, args=[self.tasks], daemon=True).start()
        return future

    def close(self) -> None:
        """Cancel the tasks that have not begun, and end each thread after its present task."""
        # Each future must be cancelled, or a thread that waits for its result would never wake.
        with suppress(Empty):
            while True:
                task = self.tasks.get_nowait()
                if task is not None:
                    task[0].cancel()
        # Each thread takes one None from the queue, and ends.
        for _ in range(self.num_started):
            self.tasks.put(None)

    # A loader that is dropped in the middle of an epoch ends its threads too.
    __del__ = close


class _Reader(threading.Thread):
    """A thread of a pool, of a class of its own so that ``_end`` finds it."""


def _work(tasks: SimpleQueue[Task | None]) -> None:
    """Call the functions of the queue until it gives None."""
    # A function of the queue alone: a thread that knew the pool would keep it from its __del__.
    while task := tasks.get():
        future, function, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            # Every error, or the caller of result() would wait forever.
            except BaseException as error:
                future.set_exception(error)
        # While it waits for the next task, it must not hold the batch of this one.
        del task, future, function, arguments


_open: WeakSet[ReadAheadPool] = WeakSet()


@atexit.register
def _end() -> None:
    """Give the threads time to end: Python kills the others, and C++ code of torch may abort."""
    for pool in list(_open):
        pool.close()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threading.enumerate():
        if isinstance(thread, _Reader):
            thread.join(max(0, deadline - time.monotonic()))
