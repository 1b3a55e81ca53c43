"""Threads that read ahead: in order, with their errors, and no end of a program waits for them."""

import threading
from concurrent.futures import CancelledError
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from library.tests.programs import PATIENCE_S, run_code
from samestep.data.threads import ReadAheadPool


def test_what_a_thread_returns_or_raises_is_in_its_future():
    others, begun, may_end = {*threading.enumerate()}, threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_end.wait()

    readers = ReadAheadPool(1)
    good, bad = readers.submit(divmod, 7, 2), readers.submit(divmod, 7, 0)
    running, cancelled = readers.submit(wait), readers.submit(print, "never")
    assert good.result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        bad.result()
    begun.wait()
    (thread,) = {*threading.enumerate()} - others
    del readers  # which closes it
    with pytest.raises(CancelledError):
        cancelled.result()
    may_end.set()
    assert running.result() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


DEAD_STORE = """
import sys, time
import torch
from samestep import BatchLoader
from samestep.data import threads
from samestep.data.lance import LanceRows

class Dead(LanceRows):
    def _read_block(self, first, num_rows):
        time.sleep(600)

class Slow:
    def __len__(self):
        return 80

    def __getitem__(self, ids):
        time.sleep(600 * (ids.min() >= 8))
        return ids

threads.PATIENCE_S = 0.5
rows = Dead(sys.argv[1])
rows.expect(torch.arange(8), 8)
batches = iter(BatchLoader(Slow(), 8, num_threads=2))
print(next(batches).tolist())
"""


@pytest.mark.program
def test_a_program_ends_while_reads_of_a_dead_store_are_in_flight(tmp_path: Path):
    lance.write_dataset(pa.table({"x": range(80)}), tmp_path / "rows")
    done = run_code(DEAD_STORE, str(tmp_path / "rows"))
    assert (done.returncode, done.stdout) == (0, f"{[*range(8)]}\n"), done.stderr
