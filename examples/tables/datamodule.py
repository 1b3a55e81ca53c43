"""Images of any number, read from tables: Lance, or Hugging Face's datasets on disk."""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from project.data.datamodule import ImageBatches
from project.data.images import Batch
from project.data.sources import decode_image, reading
from samestep import ArrowRows, BatchLoader, ConfigError, LanceRows, RunError

HELD_OUT_EVERY = 10  # such a training image is for validation, if no table is
CHECKSUM = "crc32"  # column of tables that are converted from files


class TableImages:
    """The images of one table, decoded and made alike when they are read.

    Args:
        rows: their columns are images (JPEG, PNG, ..., or Hugging Face's ``Image``) and labels.
        num_channels: 1 is grey, 3 are colours.
        image_size: height and width in pixels.
        part: None is the whole table, ``val`` every tenth image of it, ``train`` the others.
    """

    def __init__(
        self,
        rows: LanceRows | ArrowRows,
        num_channels: int,
        image_size: int,
        part: str | None = None,
    ) -> None:
        self.rows, self.part = rows, part
        self.num_channels, self.image_size = num_channels, image_size
        num_val = len(rows) // HELD_OUT_EVERY
        self.num_images = {"val": num_val, "train": len(rows) - num_val}.get(part or "", len(rows))
        if part is None and isinstance(rows, LanceRows):  # whole blocks are read, see BatchLoader
            self.expect, self.forget, self.can_hold = rows.expect, rows.forget, rows.can_hold
            self.blocks_ahead = rows.blocks_ahead

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, positions: Tensor) -> Batch:
        ids = self.rows_at(positions)
        batch = self.rows[ids]
        contents, labels, *checksums = batch.values()
        contents = [image["bytes"] if isinstance(image, dict) else image for image in contents]
        if not isinstance(labels, Tensor):
            raise ConfigError(
                f"{self.rows.uri}: the labels in its column {[*batch][1]} are no numbers, "
                f"such as {labels[0]!r}; write the number of the class into a column, and name it "
                "in data.columns"
            )
        shape = (self.num_channels, self.image_size, self.image_size)
        images = torch.empty(len(ids), *shape, dtype=torch.uint8)
        for column in checksums:
            for id, *row, expected in zip(
                ids.tolist(), contents, labels.tolist(), column.tolist(), strict=True
            ):
                if checksum(*row) != expected:
                    raise RunError(
                        f"{self.rows.uri}: row {id} is damaged: it has another checksum than when "
                        "it was written; restore the table, or convert the images again"
                    )
        for image, id, content in zip(images, ids.tolist(), contents, strict=True):
            with reading(f"{self.rows.uri}: row {id}"):
                image.copy_(decode_image(content, self.num_channels, self.image_size))
        return Batch(images, labels.long(), ids)

    def rows_at(self, positions: Tensor) -> Tensor:
        """Numbers of rows. A rule instead of a list, which would take memory for each image."""
        others = HELD_OUT_EVERY - 1
        if self.part == "val":
            return positions * HELD_OUT_EVERY + others
        return positions + positions // others if self.part == "train" else positions

    def classes(self, label: str) -> list[str] | None:
        """Their names, if the table has them."""
        metadata = self.rows.metadata
        facts = json.loads(metadata.get(b"huggingface", b"{}"))
        features = facts.get("info", {}).get("features") or {}
        names = json.loads(metadata.get(b"classes", b"null")) or features.get(label, {}).get(
            "names"
        )
        return list(names) if names else None


def checksum(content: bytes, label: int) -> int:
    """CRC-32 of an image and its label."""
    return zlib.crc32(label.to_bytes(8, "little", signed=True), zlib.crc32(content))


class TableDataModule(ImageBatches):
    """Labelled images in tables for train, val and test.

    A table whose name ends with ``.lance`` is one of ``convert``, any other is a folder of Hugging
    Face's ``save_to_disk``. Only the batches that are read ahead are in memory. A
    checkpoint knows the tables it was trained on, and a run is not continued with others.

    Args:
        root: folder of the tables, such as ``data/photos`` or ``s3://bucket/photos``.
        tables: names below ``root``. Without one for ``val``, every tenth training image is for
            validation.
        columns: names of the columns with images and labels.
        version: of the table ``train``, if it is Lance; None: the newest.
        num_threads: threads per rank that read and decode ahead; twice as many batches are held.
        storage_options: of the store, see ``LanceRows``. Keys come from the environment.
        images: the arguments of ``ImageBatches``. The images are converted to their size.

    Raises:
        ConfigError: at ``setup``, if the tables are missing, incomplete, or of other classes.
    """

    def __init__(
        self,
        *,
        root: str,
        tables: Mapping[str, str | None],
        columns: Sequence[str],
        version: int | None,
        num_threads: int,
        storage_options: Mapping[str, str] | None,
        **images: Any,
    ) -> None:
        super().__init__(root=root, **images)
        self.tables, self.columns = dict(tables), list(columns)
        self.version = version
        self.num_threads = num_threads
        self.storage_options = storage_options
        self.learned: dict[str, Any] = {}  # what a checkpoint says of its tables

    def setup(self, stage: str) -> None:
        """Open the tables, once. Lightning calls this on every rank and stage."""
        if self.train_set is not None or stage == "predict":
            return
        rows = self._open("train", self.version)
        held_out = self.tables["val"] is None
        train = self._images(rows, "train" if held_out else None)
        self.val_set = self._images(rows, "val") if held_out else self._images(self._open("val"))
        self.test_set = self._images(self._open("test"))
        if len(train) < self.global_batch_size:
            raise ConfigError(
                f"data.global_batch_size={self.global_batch_size}: must not exceed the "
                f"{len(train)} training images of {rows.uri}; set data.global_batch_size="
                f"{max(1, len(train) // 4)}"
            )
        names = train.classes(self.columns[1]) or [str(n) for n in range(self.num_classes)]
        if len(names) != self.num_classes:
            raise ConfigError(
                f"data.num_classes={self.num_classes}: {rows.uri} has {len(names)} classes"
            )
        self.learn_names(names)
        self.train_set = train
        self._compare()

    def loader(self, images: TableImages, batch_size: int, **options: Any) -> BatchLoader:
        """Rows are waited for, so threads read them."""
        return super().loader(images, batch_size, num_threads=self.num_threads, **options)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the names of the classes, and which table was read."""
        rows = self.train_set.rows
        return super().state_dict() | {"digest": rows.digest, "version": rows.version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the names from a checkpoint, and compare the tables, before or after ``setup``."""
        super().load_state_dict(state_dict)
        self.learned = state_dict
        self._compare()

    def _compare(self) -> None:
        """Raise a ConfigError if a run that continues has begun with other rows."""
        learned = self.learned
        if not self.train_set or not learned or self.train_set.rows.digest == learned["digest"]:
            return
        rows, version = self.train_set.rows, learned["version"]
        remedy = f"data.version={version}" if version else "those files"
        raise ConfigError(
            f"data.version={self.version or 'null'}: {rows.uri} (version {rows.version}) has other "
            f"rows than the run began with; continue with {remedy}, or start over under another "
            "RUN_ID"
        )

    def _open(self, part: str, version: int | None = None) -> LanceRows | ArrowRows:
        uri = f"{self.root.rstrip('/')}/{self.tables[part]}"
        if uri.endswith(".lance"):
            rows = LanceRows(
                uri, self.columns, version=version, storage_options=self.storage_options
            )
            if rows.columns and CHECKSUM in rows.table.schema.names:
                rows.columns.append(CHECKSUM)
            return rows
        if version or self.storage_options:
            raise ConfigError(f"data.version, data.storage_options: {uri} is no Lance table")
        if not Path(uri, "state.json").exists() and any(Path(self.root).rglob("*.parquet")):
            raise ConfigError(
                f"data.root={self.root}: Parquet has no random access; convert it once with "
                f"python -m examples.tables.convert {self.root} TARGET, and train with data=lance "
                "data.root=TARGET"
            )
        return ArrowRows(uri, self.columns)

    def _images(self, rows: LanceRows | ArrowRows, part: str | None = None) -> TableImages:
        return TableImages(rows, self.num_channels, self.image_size, part)
