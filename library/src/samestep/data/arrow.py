"""Rows of Arrow files, mapped into memory and read by their numbers.

``pip install samestep[lance]`` brings pyarrow.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import ConfigError

END = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of a complete stream


class ArrowRows:
    """A data set for ``BatchLoader``, written by Hugging Face's ``Dataset.save_to_disk``.

    The system reads the pages of the rows that are asked for, and takes their memory back when
    it is short.

    Args:
        uri: the folder.
        columns: their names; None reads all of them.
        decode: makes a batch of a ``pyarrow.Table`` with these columns and as many rows as the
            batch; None calls ``to_tensors``.

    Raises:
        ConfigError: if the folder has no such data or column, or a file is incomplete.
    """

    version = None  # only a Lance table has versions

    def __init__(
        self,
        uri: str,
        columns: Sequence[str] | None = None,
        *,
        decode: Callable[[pa.Table], Any] | None = None,
    ) -> None:
        self.uri = uri
        self.decode = decode or to_tensors
        self.files: list[Path] = []
        try:
            state = json.loads(Path(uri, "state.json").read_text())
            self.files += [Path(uri, file["filename"]) for file in state["_data_files"]]
            batches = self._map_files()
            self.digest = digest_of(state.get("_fingerprint"), self.files)
            """Equal only for the same rows."""
        # A KeyError: the state.json of another program.
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{uri}: is no folder that save_to_disk has written: "
                f"{str(error) or type(error).__name__}"
            ) from None
        self.schema = batches[0].schema
        names = self.schema.names
        self.columns = list(columns or names)
        check_columns(uri, self.columns, names)
        self.metadata: dict[bytes, bytes] = self.schema.metadata or {}
        self._take(batches)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, ids: Tensor) -> Any:
        """The rows ``ids``, int64 ``[B]``, in this order."""
        rows = ids.numpy()
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        places = rows - self.starts[numbers]
        found = []
        # Not Table.take: it would copy whole columns first.
        for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
            found.append(self.batches[number].slice(place, 1))
        # With the schema, because an empty slice of a rank has no batch to take it from.
        schema = self.batches[0].schema
        return self.decode(pa.Table.from_batches(found, schema).combine_chunks())

    def __getstate__(self) -> dict[str, Any]:
        # pickle would write the rows of a mapped file, and each loader process would hold a copy.
        state = vars(self).copy()
        del state["batches"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files again in another process."""
        vars(self).update(state)
        self._take(self._map_files())

    def _take(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = [batch.select(self.columns) for batch in batches]
        self.starts = np.cumsum([0, *map(len, batches)])

    def _map_files(self) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = []
        for file in self.files:
            # A stream that was cut at a batch reads without an error, and with fewer rows.
            with file.open("rb") as stream:
                stream.seek(-min(len(END), file.stat().st_size), 2)
                if stream.read() != END:
                    raise ValueError(f"{file.name} is incomplete")
            batches += pa.ipc.open_stream(pa.memory_map(str(file)))
        return batches


def check_columns(uri: str, columns: Sequence[str], names: Sequence[str]) -> None:
    """Reject columns that a table does not have."""
    for column in columns:
        if column not in names:
            raise ConfigError(f"{uri}: has no column {column}; it has {', '.join(names)}")


def digest_of(fingerprint: str | None, files: Sequence[Path]) -> str:
    """SHA-256 of the fingerprint that ``datasets`` gives to rows, and of their files and sizes."""
    # Not of the rows: every start of a run would read all of them.
    facts: list[Any] = [fingerprint]
    for file in files:
        facts.append((file.name, file.stat().st_size))
    return sha256(json.dumps(facts).encode()).hexdigest()


def to_tensors(table: pa.Table) -> dict[str, Any]:
    """Numbers as tensors ``[B]``, lists of fixed size as ``[B, size]``, all others as lists.

    Raises:
        ConfigError: if a row has no value where a tensor needs one.
    """
    batch: dict[str, Any] = {}
    for name, values in to_values(table).items():
        batch[name] = values if isinstance(values, list) else torch.from_numpy(values)
    return batch


def to_values(table: pa.Table) -> dict[str, NDArray[Any] | list[Any]]:
    """Like ``to_tensors``, with arrays instead of tensors."""
    batch: dict[str, NDArray[Any] | list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not is_numeric(column.type):
            batch[name] = column.to_pylist()
            continue
        values = column.combine_chunks()
        shape = [len(table)]
        missing = 0
        # Lists of lists: each level is one more dimension of the tensor.
        while pa.types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
            missing += values.null_count
            # flatten() leaves out the values of a missing list, so reshape would shift the others.
            values = values.flatten()
        # A missing float is nan. Arrow would make floats of a column of integers that lacks one, in
        # this batch only.
        if not pa.types.is_floating(values.type):
            missing += values.null_count
        if missing:
            raise ConfigError(
                f"column {name}: {missing} values are missing, and a tensor of {values.type} has "
                "no value that says so; fill them, or read the column with decode="
            )
        # np.array copies: to_numpy may give a view of the file, which is read-only.
        batch[name] = np.array(values.to_numpy(zero_copy_only=False)).reshape(shape)
    return batch


def is_numeric(kind: pa.DataType) -> bool:
    """Whether ``to_tensors`` makes a tensor of such a column."""
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_number or pa.types.is_boolean(kind))
