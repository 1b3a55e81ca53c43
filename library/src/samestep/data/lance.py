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

from samestep.data.arrow import is_numeric, to_tensors, to_values
from samestep.data.threads import Readers
from samestep.errors import ConfigError, RunError

log = logging.getLogger(__name__)

NUM_ROWS = b"samestep.num_rows"  # metadata of a table: how many rows it has when it is complete
MOST_HELD = 512 * 2**20  # bytes of blocks in memory; data whose blocks take more are read by rows
# Blocks read at the same time: many hide the latency of a store, few use the same memory again.
AHEAD_FAR, AHEAD_NEAR = 16, 4
# That a store may be away: Lance alone gives up after some ten seconds, a restart takes a minute.
# Less than cluster.timeout_s, after which the other ranks give up.
PATIENCE_S = 180
# Columns whose values take hardly more memory as Python's objects than in a table.
BYTES = {pa.binary(), pa.large_binary(), pa.string(), pa.large_string()}


class LanceRows:
    """A data set for ``BatchLoader``, of which only the rows of a batch are in memory.

    Reads that a store does not answer are repeated for three minutes, with growing pauses. Keys of
    the store come from the environment. Read an object store ahead with
    ``BatchLoader(..., num_threads=8)``.

    With ``BatchLoader(..., shuffle=Blocks(...))`` whole blocks are read, each once in an epoch. In
    memory are two windows of them, or, of a store, one window and 16 blocks where these are more.
    Blocks whose two windows take more than 512 MiB are not read as a whole, but row by row.

    Args:
        uri: of the table, such as ``data/train.lance`` or ``s3://bucket/train.lance``.
        columns: their names; None reads all of them.
        decode: makes a batch of a ``pyarrow.Table`` with these columns and as many rows as the
            batch; None calls ``to_tensors``.
        version: of the table; None reads the newest one, and stays with it.
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
        names = self.table.schema.names
        if missing := [name for name in self.columns or [] if name not in names]:
            raise ConfigError(f"{uri}: has no column {missing[0]}; it has {', '.join(names)}")
        self.metadata: dict[bytes, bytes] = self.table.schema.metadata or {}
        whole = int(self.metadata.get(NUM_ROWS, self.num_rows))
        if self.num_rows < whole:
            raise ConfigError(
                f"{uri}: holds {self.num_rows} of {whole} rows; repeat the conversion"
            )
        self.version = int(self.table.version)
        self.blocks_ahead = AHEAD_FAR if "://" in uri else AHEAD_NEAR
        self._begin()

    def _begin(self) -> None:
        """What only this process has."""
        self.process = os.getpid()
        self.readers = Readers(self.blocks_ahead)
        self.lock = threading.Lock()
        self.blocks: dict[int, _Block] = {}
        self.block_size = 1

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, ids: Tensor) -> Any:
        """The rows ``ids``, int64 ``[B]``, in this order."""
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
        return rows if isinstance(rows, dict) else self.decode(rows)

    def _patiently(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """What ``read`` returns, also if the store is away for a while."""
        deadline, pause = time.monotonic() + PATIENCE_S, 1
        while True:
            try:
                return read(*arguments)
            except (OSError, ValueError, RuntimeError) as error:
                # So Lance calls what it has repeated itself: 5xx, timeouts, lost connections.
                may_pass = "max_retries" in str(error) or "HTTP error" in str(error)
                if not may_pass or time.monotonic() + pause > deadline:
                    raise
                log.warning("%s: %s; it is read again", self.uri, first_line(error))
            time.sleep(pause)
            pause = min(2 * pause, 30)

    def expect(self, ids: Tensor, block_size: int) -> None:
        """Read the blocks of these rows ahead, and hold them until the rows are asked for.

        A block is ``block_size`` neighbours, the first of which is a multiple of it.
        """
        if block_size != self.block_size:
            self.forget()
        with self.lock:
            for number in sorted({*(ids // block_size).tolist()}):
                if number not in self.blocks:
                    place = number * block_size, block_size
                    block = self.readers.submit(self._patiently, self._read_block, *place)
                    self.blocks[number] = _Block(block)
                self.blocks[number].num_batches += 1
            self.block_size = block_size

    def forget(self) -> None:
        """Do not hold any block."""
        with self.lock:
            for block in self.blocks.values():
                block.rows.cancel()
            self.blocks = {}
            self.block_size = 1

    def can_hold(self, num_rows: int) -> bool:
        """Whether so many rows may be in memory."""
        files = [file for part in self.table.get_fragments() for file in part.data_files()]
        num_bytes = sum(file.file_size_bytes or MOST_HELD for file in files)
        return num_bytes * num_rows <= MOST_HELD * self.num_rows

    @cached_property
    def sessions(self) -> tuple[list[int], list[Any]]:
        """Where each fragment ends, and what reads rows of it again and again."""
        fragments = self.table.get_fragments()
        ends = accumulate(fragment.count_rows() for fragment in fragments)
        return [*ends], [fragment.open_session(self.columns) for fragment in fragments]

    def _read_block(self, first: int, num_rows: int) -> "_Values | pa.RecordBatch":
        ends, sessions = self.sessions
        number, last = bisect(ends, first), min(first + num_rows, self.num_rows)
        if last <= ends[number]:
            start = ends[number - 1] if number else 0
            table = sessions[number].take(range(first - start, last - start))
        else:
            table = self.table.to_table(self.columns, offset=first, limit=num_rows)
        kinds = table.schema.types
        if self.decode is to_tensors and all(kind in BYTES or is_numeric(kind) for kind in kinds):
            # This thread makes the one copy, and not the one that waits for the batch.
            return to_values(table)
        return table.combine_chunks().to_batches()[0]

    def _take_from_blocks(self, ids: Tensor) -> dict[str, Any] | pa.Table | None:
        """The rows ``ids``, if all their blocks are expected."""
        numbers, places = np.divmod(ids.numpy(), self.block_size)
        with self.lock:
            needed = sorted({*numbers.tolist()})
            found = {number: self.blocks[number] for number in needed if number in self.blocks}
        if not needed or len(found) < len(needed):
            return None
        try:
            blocks: dict[int, Any] = {
                number: block.rows.result() for number, block in found.items()
            }
        except CancelledError:  # another pass over these rows has ended early
            return None
        rows: dict[str, Any] | pa.Table
        if isinstance(blocks[needed[0]], dict):
            rows = pick_values(blocks, numbers, places)
        else:
            where = zip(numbers.tolist(), places.tolist(), strict=True)
            # A batch of slices, which is copied once: ``decode`` expects no chunks.
            slices = [blocks[number].slice(place, 1) for number, place in where]
            rows = pa.Table.from_batches(slices).combine_chunks()
        with self.lock:
            for number, block in found.items():
                block.num_batches -= 1
                if not block.num_batches and self.blocks.get(number) is block:
                    del self.blocks[number]
        return rows

    def __getstate__(self) -> dict[str, Any]:
        own = ("table", "sessions", "readers", "lock", "blocks")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the same version in another process."""
        vars(self).update(state)
        self.table = lance.dataset(self.uri, version=self.version, storage_options=self.options)
        self._begin()

    @cached_property  # each checkpoint asks for it
    def digest(self) -> str:
        """Of the files of this version, whose names are unique: equal only for the same rows."""
        fragments = self.table.get_fragments()
        files = [str(file.path) for fragment in fragments for file in fragment.data_files()]
        names = files + [str(fragment.deletion_file()) for fragment in fragments]
        return sha256("\n".join(names).encode()).hexdigest()


_Values = dict[str, NDArray[Any] | list[Any]]


class _Block:
    """Neighbouring rows, read ahead for some batches."""

    def __init__(self, rows: Future[_Values | pa.RecordBatch]) -> None:
        self.rows = rows
        self.num_batches = 0


def pick_values(
    blocks: dict[int, _Values], numbers: NDArray[np.int64], places: NDArray[np.int64]
) -> dict[str, Any]:
    """A batch as ``to_tensors`` makes it, of the rows at ``places`` of the blocks ``numbers``."""
    batch: dict[str, Any] = {}
    for name, one in next(iter(blocks.values())).items():
        columns = {number: block[name] for number, block in blocks.items()}
        if isinstance(one, list):
            rows = zip(numbers.tolist(), places.tolist(), strict=True)
            batch[name] = [columns[number][place] for number, place in rows]
            continue
        values = np.empty((len(places), *one.shape[1:]), one.dtype)
        for number, column in columns.items():
            here = numbers == number
            values[here] = column[places[here]]
        batch[name] = torch.from_numpy(values)
    return batch


def first_line(error: BaseException) -> str:
    """What an error of Lance says, without the places in its source."""
    return str(error).splitlines()[0].partition(", /")[0].removeprefix("LanceError(IO): ")
