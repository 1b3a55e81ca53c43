"""Images of any number, read from tables: Lance, or Hugging Face's datasets on disk."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from project.data import Images, read_image
from samestep import ArrowRows, BatchLoader, ConfigError, LanceRows, RunError

CHECKSUM = "crc32"  # column of tables that are converted from files


class TableImages:
    """Images of one table, decoded and made alike when they are read.

    Args:
        rows: their columns are images (JPEG, PNG, ..., or Hugging Face's ``Image``) and labels.
        num_channels: 1 is grey, 3 are colours.
        image_size: height and width in pixels.
        length: number of images; None: all of the table.
        rows_at: from positions to numbers of rows. A list would take memory for each image.
    """

    def __init__(
        self,
        rows: LanceRows | ArrowRows,
        num_channels: int,
        image_size: int,
        length: int | None = None,
        rows_at: Callable[[Tensor], Tensor] = torch.as_tensor,
    ) -> None:
        self.rows, self.rows_at = rows, rows_at
        self.num_channels, self.image_size = num_channels, image_size
        self.length = len(rows) if length is None else length
        if length is None and isinstance(rows, LanceRows):  # whole blocks are read, see BatchLoader
            self.expect, self.forget, self.can_hold = rows.expect, rows.forget, rows.can_hold
            self.blocks_ahead = rows.blocks_ahead

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Tensor) -> list[Tensor]:
        ids = self.rows_at(positions)
        contents, labels, *checksums = (batch := self.rows[ids]).values()
        checksums = [column.tolist() for column in checksums]
        if not isinstance(labels, Tensor):
            raise ConfigError(
                f"{self.rows.uri}: the labels in its column {[*batch][1]} are no numbers, "
                f"such as {labels[0]!r}; write the number of the class into a column, and name it "
                "in data.columns"
            )
        shape = (self.num_channels, self.image_size, self.image_size)
        images = torch.empty(len(ids), *shape, dtype=torch.uint8)
        for place, (id, content, label) in enumerate(
            zip(ids.tolist(), contents, labels.tolist(), strict=True)
        ):
            content = content["bytes"] if isinstance(content, dict) else content
            if any(column[place] != checksum(content, label) for column in checksums):
                raise RunError(
                    f"{self.rows.uri}: row {id} is damaged: it has another checksum than when it "
                    "was written; restore the table, or convert the images again"
                )
            try:
                images[place] = read_image(BytesIO(content), *shape[:2])
            except RunError as error:
                raise RunError(f"{self.rows.uri}: row {id}: {error.__cause__}") from error
        return [images, labels.long()]


def checksum(content: bytes, label: int) -> int:
    """CRC-32 of an image and its label."""
    return zlib.crc32(label.to_bytes(8, "little", signed=True), zlib.crc32(content))


@dataclass(kw_only=True, eq=False, repr=False)
class TableDataModule(Images):
    """Labelled images in tables for train, val and test; of ``Images`` it lacks the data set.

    A table whose name ends with ``.lance`` is one of ``convert``, any other is a folder of Hugging
    Face's ``save_to_disk``. Only the batches that are read ahead are in memory. A
    checkpoint knows the tables it was trained on, and a run is not continued with others.
    """

    root: str  # folder of the tables, such as data/photos or s3://bucket/photos
    tables: Sequence[str]  # of train, val and test below root, or of train and test
    columns: Sequence[str]  # the names of those with images and labels
    version: int | None  # of the training table, if it is Lance; None: the newest
    num_threads: int  # per rank, that read and decode ahead; twice as many batches are in memory
    storage_options: Mapping[str, str] | None  # of the store; keys come from the environment
    dataset: Any = None
    download: bool = False
    mirror: str | None = None
    num_val: int | None = None
    num_workers: int = 0
    learned: dict[str, Any] = field(default_factory=dict, init=False)  # what a checkpoint says

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.columns) != 2 or len(self.tables) not in (2, 3):
            raise ValueError("columns must be two names, and tables two or three")

    def prepare_data(self) -> None:
        """Nothing: tables are not downloaded."""

    def setup(self, stage: str) -> None:
        """Open the tables, once. Without one for ``val``, every tenth training image is for it."""
        if self.train_set is not None or stage == "predict":
            return
        name, *of_val, of_test = self.tables
        shape = self.num_channels, self.image_size
        self.rows = rows = self.open(name, self.version)
        self.test_set = TableImages(self.open(of_test), *shape)
        if of_val:
            self.train_set = TableImages(rows, *shape)
            self.val_set = TableImages(self.open(of_val[0]), *shape)
        else:
            num_val = len(rows) // 10
            self.train_set = TableImages(rows, *shape, len(rows) - num_val, lambda p: p + p // 9)
            self.val_set = TableImages(rows, *shape, num_val, lambda p: 10 * p + 9)
        names = find_classes(rows, self.columns[1]) or [*map(str, range(self.num_classes))]
        if len(names) != self.num_classes or self.class_names not in (None, names):
            known = f"the model knows {self.class_names or self.num_classes} classes"
            raise ConfigError(f"data.root={self.root}: {known}, and the data have {names}")
        self.class_names = names
        self.compare()

    def loader(self, part: Any, batch_size: int, **options: Any) -> BatchLoader:
        """Rows are waited for, so threads read them."""
        return BatchLoader(part, batch_size, num_threads=self.num_threads, **options)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the names of the classes, and which table was read."""
        return super().state_dict() | {"digest": self.rows.digest, "version": self.rows.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the names from a checkpoint, and compare the tables, before or after ``setup``."""
        super().load_state_dict(state_dict)
        self.learned = state_dict
        self.compare()

    def compare(self) -> None:
        """Raise a ConfigError if a run that continues has begun with other rows."""
        if not self.train_set or self.rows.digest == self.learned.get("digest", self.rows.digest):
            return
        rows, version = self.rows, self.learned["version"]
        remedy = f"data.version={version}" if version else "those files"
        raise ConfigError(
            f"data.version={self.version or 'null'}: {rows.uri} (version {rows.version}) has other "
            f"rows than the run began with; continue with {remedy}, or start over under another "
            "RUN_ID"
        )

    def open(self, name: str, version: int | None = None) -> LanceRows | ArrowRows:
        """The rows of a table."""
        uri, options = f"{self.root.rstrip('/')}/{name}", self.storage_options
        if uri.endswith(".lance"):
            rows = LanceRows(uri, self.columns, version=version, storage_options=options)
            if rows.columns and CHECKSUM in rows.table.schema.names:
                rows.columns.append(CHECKSUM)
            return rows
        if version or options:
            raise ConfigError(f"data.version, data.storage_options: {uri} is no Lance table")
        if not Path(uri, "state.json").exists() and any(Path(self.root).rglob("*.parquet")):
            raise ConfigError(
                f"data.root={self.root}: Parquet has no random access; convert it once with "
                f"python -m examples.tables.convert {self.root} TARGET, and train with data=lance "
                "data.root=TARGET"
            )
        return ArrowRows(uri, self.columns)


def find_classes(rows: LanceRows | ArrowRows, label: str) -> list[str] | None:
    """The names of the classes, if the table has them."""
    features = json.loads(rows.metadata.get(b"huggingface", b"{}")).get("info", {}).get("features")
    of_label = (features or {}).get(label, {})
    names: list[str] | None = json.loads(rows.metadata.get(b"classes", b"null"))
    return names or of_label.get("names")
