"""Rows of a Lance table, read by their numbers: data of any size, in a folder or an object store.

``pip install samestep[lance]``. The format is https://lance.org; ``take`` reads some rows in any
order with few requests, so the exact order of ``BatchLoader`` needs no stream and no shards.
"""

import logging
import os
import threading
import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.data.arrow import check_columns, is_numeric, to_tensors, to_values
from samestep.data.threads import ReadAheadPool
from samestep.errors import ConfigError, RunError

log = logging.getLogger(__name__)

NUM_ROWS = b"samestep.num_rows"  # metadata of a table: how many rows it has when it is complete
MAX_BLOCK_BYTES = 512 * 2**20  # of blocks in memory; larger ones are not read, but single rows
# Blocks read at the same time: many hide the latency of a store, few reuse the same memory.
AHEAD_FAR, AHEAD_NEAR = 16, 4
# Seconds for which a store may be away: Lance alone gives up after about ten, and a restart takes a
# minute. Less than the timeout of a run, after which the other ranks give up.
PATIENCE_S = 180
# Columns whose values take hardly more memory as Python objects than in a table.
BYTES = {pa.binary(), pa.large_binary(), pa.string(), pa.large_string()}


class LanceRows:
    """A data set for ``BatchLoader``, of which only the rows of a batch are in memory.

    Reads that a store does not answer are repeated for three minutes, with growing pauses. The
    credentials of the store come from the environment. Read an object store ahead with
    ``BatchLoader(..., num_threads=8)``.

    With ``BatchLoader(..., shuffle=Blocks(...))`` whole blocks are read, each once per epoch. Two
    windows of blocks are in memory; for a store, one window and 16 blocks if these are more. If two
    windows take more than 512 MiB, single rows are read instead.

    Args:
        uri: of the table, such as ``data/train.lance`` or ``s3://bucket/train.lance``.
        columns: their names; None reads all of them.
        decode: makes a batch of a ``pyarrow.Table`` with these columns and as many rows as the
            batch; None calls ``to_tensors``.
        version: of the table; None reads the newest one of this moment, and no newer one later.
        storage_options: of the store, see Lance's documentation.

    Raises:
        ConfigError: if there is no such table, version or column.
        RunError: when rows are read and the store cannot give them.
    """

    def __init__(
        self,
        uri: str,
        columns: Sequence[str] | None = None,
        *,
        decode: Callable[[pa.Table], Any] | None = None,
        version: int | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.uri = uri
        self.columns = list(columns) if columns else None
        self.decode = decode or to_tensors
        self.options = dict(storage_options or {})
        try:
            self.table = lance.dataset(uri, version=version, storage_options=self.options)
            self.num_rows = self.table.count_rows()
        except (OSError, ValueError) as error:
            of_version = f", version {version}" if version else ""
            raise ConfigError(f"{uri}{of_version}: cannot be opened: {first_line(error)}") from None
        check_columns(uri, self.columns or [], self.table.schema.names)
        self.metadata: dict[bytes, bytes] = self.table.schema.metadata or {}
        # A conversion that was killed leaves a valid table with the rows written so far.
        complete = int(self.metadata.get(NUM_ROWS, self.num_rows))
        if self.num_rows < complete:
            raise ConfigError(
                f"{uri}: holds {self.num_rows} of {complete} rows; repeat the conversion"
            )
        self.version = int(self.table.version)
        self.blocks_ahead = AHEAD_FAR if "://" in uri else AHEAD_NEAR
        self._set_up_process()

    def _set_up_process(self) -> None:
        """Make what cannot be sent to another process."""
        self.process = os.getpid()
        self.readers = ReadAheadPool(self.blocks_ahead)
        # Threads of a BatchLoader ask for rows while its main thread announces others.
        self.lock = threading.Lock()
        self.blocks: dict[int, _Block] = {}
        self.block_size = 1

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, ids: Tensor) -> Any:
        """The rows ``ids``, int64 ``[B]``, in this order."""
        # Lance's own threads do not survive a fork, and a read would wait for them forever.
        if os.getpid() != self.process:
            raise ConfigError(
                f"{self.uri}: Lance cannot be read by a process that was forked: read ahead by "
                "threads, BatchLoader(num_threads=8), and not by num_workers"
            )
        try:
            rows = self._take_from_blocks(ids)
            if rows is None:
                rows = self._patiently(self.table.take, ids.tolist(), self.columns)
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(
                f"{self.uri}: version {self.version} cannot be read: {first_line(error)}"
            ) from error
        # Rows from blocks of values are a batch already, see _read_block.
        return rows if isinstance(rows, dict) else self.decode(rows)

    def _patiently(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """What ``read`` returns; it is called again while the store is away."""
        deadline = time.monotonic() + PATIENCE_S
        pause = 1
        while True:
            try:
                return read(*arguments)
            except (OSError, ValueError, RuntimeError) as error:
                # Lance has one type for all errors. These texts name those that it has retried
                # itself: 5xx, timeouts, lost connections.
                may_pass = "max_retries" in str(error) or "HTTP error" in str(error)
                if not may_pass or time.monotonic() + pause > deadline:
                    raise
                log.warning("%s: %s; it is read again", self.uri, first_line(error))
            time.sleep(pause)
            pause = min(2 * pause, 30)

    def expect(self, ids: Tensor, block_size: int) -> None:
        """Read the blocks of a batch ahead, and hold them until the batch is read.

        A block is ``block_size`` neighbours, the first of which is a multiple of it.

        Args:
            ids: the rows of one batch, which is read later by ``dataset[ids]``, once.
            block_size: rows of a block.
        """
        # Blocks of another size are from another loader of this data set, and have other numbers.
        if block_size != self.block_size:
            self.forget()
        with self.lock:
            for number in sorted({*(ids // block_size).tolist()}):
                if number not in self.blocks:
                    first = number * block_size
                    rows = self.readers.submit(self._patiently, self._read_block, first, block_size)
                    self.blocks[number] = _Block(rows)
                # Batches that were announced and not read yet. A block is needed by many batches of
                # its window, and may go only after the last of them: see _take_from_blocks.
                self.blocks[number].num_batches += 1
            self.block_size = block_size

    def forget(self) -> None:
        """Release all blocks; rows of them are read one by one."""
        with self.lock:
            for block in self.blocks.values():
                block.rows.cancel()
            self.blocks = {}
            self.block_size = 1

    def can_hold(self, num_rows: int) -> bool:
        """Whether so many rows may be in memory."""
        num_bytes = 0
        for fragment in self.table.get_fragments():
            for file in fragment.data_files():
                # Old tables lack the sizes of their files, which may be large.
                num_bytes += file.file_size_bytes or MAX_BLOCK_BYTES
        # num_rows of an average size; multiplied, because an empty table has no average.
        return num_bytes * num_rows <= MAX_BLOCK_BYTES * self.num_rows

    @cached_property
    def sessions(self) -> tuple[list[int], list[Any]]:
        """Where each fragment begins and the last one ends, and objects that read their rows."""
        fragments = self.table.get_fragments()
        sizes = [fragment.count_rows() for fragment in fragments]
        # An open session keeps the metadata of its file, which each read would fetch again.
        sessions = [fragment.open_session(self.columns) for fragment in fragments]
        return [*accumulate(sizes, initial=0)], sessions

    def _read_block(self, first: int, num_rows: int) -> "_Values | pa.RecordBatch":
        starts, sessions = self.sessions
        number = bisect(starts, first) - 1
        last = min(first + num_rows, self.num_rows)
        if last <= starts[number + 1]:
            # Within one fragment: its session counts rows from its own start.
            start = starts[number]
            table = sessions[number].take(range(first - start, last - start))
        else:
            table = self.table.to_table(self.columns, offset=first, limit=num_rows)
        if self.decode is to_tensors and all(map(has_compact_values, table.schema.types)):
            # Here, by a thread that reads ahead, not while a step waits for its batch.
            return to_values(table)
        return table.combine_chunks().to_batches()[0]

    def _take_from_blocks(self, ids: Tensor) -> dict[str, Any] | pa.Table | None:
        """The rows ``ids``; None unless all their blocks are expected."""
        numbers, places = np.divmod(ids.numpy(), self.block_size)
        needed = sorted({*numbers.tolist()})
        with self.lock:
            found = {number: self.blocks[number] for number in needed if number in self.blocks}
        # Rows that were not announced: on many ranks, and in evaluation. Or no rows at all.
        if not needed or len(found) < len(needed):
            return None
        blocks: dict[int, Any] = {}
        try:
            # Without the lock: `expect` must not wait for these reads.
            for number, block in found.items():
                blocks[number] = block.rows.result()
        except CancelledError:
            # `forget` was called meanwhile: another pass over these rows has ended early.
            return None
        rows: dict[str, Any] | pa.Table
        if isinstance(blocks[needed[0]], dict):
            rows = pick_values(blocks, numbers, places)
        else:
            slices = []
            for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
                slices.append(blocks[number].slice(place, 1))
            # Copied once, into one batch: ``decode`` expects no chunks.
            rows = pa.Table.from_batches(slices).combine_chunks()
        self._release(found)
        return rows

    def _release(self, found: dict[int, "_Block"]) -> None:
        """Count a batch as read; blocks that no announced batch needs any more are dropped.

        A read that was never announced counts too if it finds its blocks. Then the last batch finds
        one of them gone, and reads its rows one by one: slower, but the same rows.
        """
        with self.lock:
            for number, block in found.items():
                block.num_batches -= 1
                # After `forget`, a new block may have this number, and its own count.
                is_held = self.blocks.get(number) is block
                if block.num_batches == 0 and is_held:
                    del self.blocks[number]

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        # Handles and threads of this process; the other one makes its own in __setstate__.
        for name in ("table", "sessions", "readers", "lock", "blocks"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same version in another process."""
        vars(self).update(state)
        self.table = lance.dataset(self.uri, version=self.version, storage_options=self.options)
        self._set_up_process()

    @cached_property  # each checkpoint asks for it
    def digest(self) -> str:
        """Of the files of this version, whose names are unique: equal only for the same rows."""
        files = []
        deletions = []
        for fragment in self.table.get_fragments():
            files += [str(file.path) for file in fragment.data_files()]
            # Deleted rows leave the data as they are, and add a file that lists them.
            deletions.append(str(fragment.deletion_file()))
        return sha256("\n".join(files + deletions).encode()).hexdigest()


_Values = dict[str, NDArray[Any] | list[Any]]


class _Block:
    """Neighbouring rows, read ahead for some batches."""

    def __init__(self, rows: Future[_Values | pa.RecordBatch]) -> None:
        self.rows = rows
        self.num_batches = 0  # announced, and not read yet


def has_compact_values(kind: pa.DataType) -> bool:
    """Whether a column takes hardly more memory as an array or a list than in a table."""
    return kind in BYTES or is_numeric(kind)


def pick_values(
    blocks: dict[int, _Values], numbers: NDArray[np.int64], places: NDArray[np.int64]
) -> dict[str, Any]:
    """A batch as ``to_tensors`` makes it, of the rows at ``places`` of the blocks ``numbers``."""
    batch: dict[str, Any] = {}
    for name, example in next(iter(blocks.values())).items():
        columns = {number: block[name] for number, block in blocks.items()}
        if isinstance(example, list):
            batch[name] = []
            for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
                batch[name].append(columns[number][place])
            continue
        values = np.empty((len(places), *example.shape[1:]), example.dtype)
        # A copy per block, not per row: a batch has many rows of each block of its window.
        for number, column in columns.items():
            here = numbers == number
            values[here] = column[places[here]]
        batch[name] = torch.from_numpy(values)
    return batch


def first_line(error: BaseException) -> str:
    """The message of an error of Lance, without the lines of its source code."""
    return str(error).splitlines()[0].partition(", /")[0].removeprefix("LanceError(IO): ")
