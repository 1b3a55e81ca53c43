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

END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream that was written to its end


class ArrowRows:
    """A data set for ``BatchLoader``: what Hugging Face's ``Dataset.save_to_disk`` has written.

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
            sizes = [file.stat().st_size for file in self.files]
            batches = self._map_files()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{uri}: is no folder that save_to_disk has written: "
                f"{str(error) or type(error).__name__}"
            ) from None
        self.schema = batches[0].schema
        names = self.schema.names
        self.columns = list(columns or names)
        if missing := [name for name in self.columns if name not in names]:
            raise ConfigError(f"{uri}: has no column {missing[0]}; it has {', '.join(names)}")
        self.metadata: dict[bytes, bytes] = self.schema.metadata or {}
        self._take(batches)
        facts = [state.get("_fingerprint"), *zip([f.name for f in self.files], sizes, strict=True)]
        self.digest = sha256(json.dumps(facts).encode()).hexdigest()
        """Of the fingerprint that ``datasets`` gives to the rows, and of the files and sizes."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, ids: Tensor) -> Any:
        """The rows ``ids``, int64 ``[B]``, in this order."""
        rows = ids.numpy()
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        places = zip(numbers.tolist(), (rows - self.starts[numbers]).tolist(), strict=True)
        # Table.take would copy whole columns first.
        found = [self.batches[number].slice(row, 1) for number, row in places]
        schema = self.batches[0].schema
        return self.decode(pa.Table.from_batches(found, schema).combine_chunks())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "batches"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files in another process, instead of a copy of their rows."""
        vars(self).update(state)
        self._take(self._map_files())

    def _take(self, batches: list[pa.RecordBatch]) -> None:
        self.batches = [batch.select(self.columns) for batch in batches]
        self.starts = np.cumsum([0, *map(len, batches)])

    def _map_files(self) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = []
        for file in self.files:
            with file.open("rb") as stream:
                stream.seek(-min(len(END), file.stat().st_size), 2)
                if stream.read() != END:
                    raise ValueError(f"{file.name} is incomplete")
            batches += pa.ipc.open_stream(pa.memory_map(str(file)))
        return batches


def to_tensors(table: pa.Table) -> dict[str, Any]:
    """Numbers as tensors ``[B]``, lists of fixed size as ``[B, size]``, all others as lists.

    Raises:
        ConfigError: if a row has no value where a tensor needs one.
    """
    return {
        name: values if isinstance(values, list) else torch.from_numpy(values)
        for name, values in to_values(table).items()
    }


def to_values(table: pa.Table) -> dict[str, NDArray[Any] | list[Any]]:
    """Like ``to_tensors``, with arrays instead of tensors."""
    batch: dict[str, NDArray[Any] | list[Any]] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not is_numeric(column.type):
            batch[name] = column.to_pylist()
            continue
        values, shape, missing = column.combine_chunks(), [len(table)], 0
        while pa.types.is_fixed_size_list(values.type):
            shape.append(values.type.list_size)
            missing += values.null_count
            values = values.flatten()
        if not pa.types.is_floating(values.type):
            missing += values.null_count
        if missing:
            raise ConfigError(
                f"column {name}: {missing} values are missing, for which a tensor of {values.type} "
                "has no sign; fill them, or read the column with decode="
            )
        batch[name] = np.array(values.to_numpy(zero_copy_only=False)).reshape(shape)
    return batch


def is_numeric(kind: pa.DataType) -> bool:
    """Whether ``to_tensors`` makes a tensor of such a column."""
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
