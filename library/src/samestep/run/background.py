"""Saves that a thread writes while training goes on: training waits for a copy in memory only.

The copy is the file itself, as ``torch.save`` writes it. So nothing that training changes later can
get into it, and the thread only hashes and writes bytes, for which it needs no GIL.
"""

import mmap
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

MEMINFO, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
SPARE = 4 * 2**20  # bytes of a file beside its tensors: names, numbers, the history


class MemoryFile:
    """A file in memory, to which ``torch.save`` writes; the memory is used again by the next file.

    To fill memory that the process has had before takes a fifth of the time.
    """

    def __init__(self) -> None:
        self._memory = allocate(0)
        self._size = 0

    @property
    def capacity(self) -> int:
        """Bytes that the memory holds."""
        return len(self._memory)

    def begin(self, num_bytes: int) -> None:
        """Begin a file of about this size."""
        self._size = 0
        if num_bytes > self.capacity:
            # The old memory goes first: there is never more than one copy.
            self._memory = allocate(0)
            self._memory = allocate(num_bytes)

    def write(self, data: Any) -> None:
        """Append bytes."""
        block = memoryview(data)
        end = self._size + len(block)
        if end > self.capacity:
            larger = allocate(end + end // 8)
            larger[: self._size] = self._memory[: self._size]
            self._memory = larger
        self._memory[self._size : end] = block
        self._size = end

    def flush(self) -> None:
        """Do nothing; ``torch.save`` calls it."""

    def view(self) -> memoryview:
        """The bytes of the file."""
        return memoryview(self._memory)[: self._size]


def allocate(num_bytes: int) -> mmap.mmap:
    """Memory that no process shares."""
    memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Loader processes are forked, and would make the next save copy each page. Linux only.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return memory


class BackgroundWriter:
    """Copies what is saved, and lets a thread write it."""

    def __init__(self) -> None:
        self._file = MemoryFile()
        self._thread = ThreadPoolExecutor(1)

    def find_lack(self, num_bytes: int, num_ranks: int) -> str | None:
        """Why there is no room for a copy of this size on each of so many ranks; None if there is.

        Half of the free memory stays free: the batches of the next steps are in no checkpoint.
        """
        needed = num_ranks * (num_bytes + SPARE - self._file.capacity)
        free = available_memory()
        if free is None or needed <= 0 or needed <= free / 2:
            return None
        return f"a copy takes {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB of free memory"

    def copy(self, save: Callable[[MemoryFile], None], num_bytes: int) -> memoryview:
        """Let ``save`` write a file of about so many bytes into memory; training waits for this."""
        self._file.begin(num_bytes + SPARE)
        save(self._file)
        return self._file.view()

    def start(self, write: Callable[..., None], *arguments: Any) -> Future[float]:
        """Call ``write`` in the thread; the result is how many seconds of a processor it took."""

        def work() -> float:
            started = time.thread_time()
            write(*arguments)
            return time.thread_time() - started

        return self._thread.submit(work)

    def release(self) -> None:
        """Give the memory back, once nothing is being written."""
        self._file = MemoryFile()


def available_memory() -> int | None:
    """Bytes that this process may still allocate: those of its container; None if unknown."""
    found = []
    system = read_numbers(MEMINFO)
    if "MemAvailable:" in system:
        found.append(1024 * system["MemAvailable:"])
    limit = read_numbers(GROUP / "memory.max", "limit").get("limit")
    used = read_numbers(GROUP / "memory.current", "used").get("used")
    if limit is not None and used is not None:
        # The kernel drops pages of files that nothing uses when a process needs memory.
        cached = read_numbers(GROUP / "memory.stat").get("inactive_file", 0)
        found.append(limit - used + cached)
    return min(found, default=None)


def read_numbers(path: Path, name: str = "") -> dict[str, int]:
    """The numbers in a file of the kernel, by the first word of each line, or by ``name``."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    numbers = {}
    for line in lines:
        words = [name, *line.split()] if name else line.split()
        # A group without a limit says ``max``.
        if len(words) > 1 and words[1].isdecimal():
            numbers[words[0]] = int(words[1])
    return numbers
