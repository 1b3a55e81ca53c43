"""Convert image folders, Parquet files and Hugging Face datasets into Lance tables."""

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import lance
import pyarrow as pa
import pyarrow.dataset as arrow_dataset
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.tables.datamodule import CHECKSUM, checksum
from project.data import SPLIT_SEED, folder
from samestep import ArrowRows, ConfigError, RunError
from samestep.data.lance import NUM_ROWS, first_line

IMAGES_AT_ONCE, ROWS_AT_ONCE, BYTES_AT_ONCE = 1024, 2**18, 2**28  # of a file of the table
VAL = dict.fromkeys(["validation", "valid", "dev"], "val")  # other names of this split
SOURCE = b"source"  # metadata of a table: digest of what it was converted from


class Part(NamedTuple):
    """A table to be written."""

    name: str
    """Such as ``train``; empty if the source is one table."""
    schema: pa.Schema
    num_rows: int
    digest: str
    """Of the names and sizes of the files that the rows come from."""
    read: Callable[[int], Iterator[pa.Table]]
    """Yields the rows from a position on, in pieces that become files of the table."""


def convert(source: Path, target: str, val_share: float) -> Iterator[tuple[str, int]]:
    """Write the tables of a source with a progress bar; yields the address and rows of each."""
    parts, screen = find_parts(source, val_share), Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, disable=not screen.is_terminal
    ) as progress:
        for part in parts:
            uri = f"{target}/{part.name}.lance" if part.name else target
            bar = progress.add_task(uri, total=part.num_rows)
            for done in write_table(part, uri):
                progress.update(bar, completed=done)
            yield uri, part.num_rows


def find_parts(source: Path, val_share: float) -> list[Part]:
    """The tables that a source becomes.

    Raises:
        ConfigError: if it is none that can be converted.
    """
    if (source / "dataset_dict.json").is_file():
        splits = json.loads((source / "dataset_dict.json").read_text())["splits"]
        return [arrow_part(source / split, VAL.get(split, split)) for split in splits]
    if (source / "state.json").is_file():
        return [arrow_part(source, "")]
    files = [source] if source.suffix == ".parquet" else sorted(source.rglob("*.parquet"))
    if not files:
        return find_images(source, val_share)
    # The Hub calls the files of a data set train-00000-of-00002.parquet.
    names = [file.stem.split("-")[0] for file in files]
    if not {"train", "test"}.issubset(names):
        names = [""] * len(files)
    return [
        parquet_part([f for f, of in zip(files, names, strict=True) if of == name], name)
        for name in dict.fromkeys(names)
    ]


def arrow_part(folder: Path, name: str) -> Part:
    """What Hugging Face's ``Dataset.save_to_disk`` has written."""
    rows = ArrowRows(str(folder))
    return part_of(rows.files, name, rows.schema, len(rows), lambda: iter(rows.batches))


def parquet_part(files: list[Path], name: str) -> Part:
    """The rows of some Parquet files."""
    rows = arrow_dataset.dataset([str(file) for file in files], format="parquet")
    return part_of(
        files, VAL.get(name, name), rows.schema, rows.count_rows(), lambda: rows.to_batches()
    )


def part_of(
    files: list[Path],
    name: str,
    schema: pa.Schema,
    num_rows: int,
    read_all: Callable[[], Iterator[pa.RecordBatch]],
) -> Part:
    """A table of all columns, with the names of the classes that Hugging Face keeps."""

    def read(start: int) -> Iterator[pa.Table]:
        held: list[pa.RecordBatch] = []
        for batch in read_all():
            start, new = max(0, start - len(batch)), batch.slice(min(start, len(batch)))
            held.append(new)
            if sum(map(len, held)) >= ROWS_AT_ONCE or sum(b.nbytes for b in held) >= BYTES_AT_ONCE:
                yield pa.Table.from_batches(held)
                held = []
        if sum(map(len, held)):
            yield pa.Table.from_batches(held)

    kept = {key: value for key, value in (schema.metadata or {}).items() if key == b"huggingface"}
    return Part(name, schema.with_metadata(kept), num_rows, digest_of(files), read)


def find_images(source: Path, val_share: float) -> list[Part]:
    """The tables ``train``, ``val`` and ``test``, with the columns image, label and checksum.

    The files are kept as they are, in a random order: neighbours in a table are of unlike classes,
    so ``shuffle=Blocks(...)`` mixes them well.
    """
    try:
        found = [folder(str(source), train, False, 3, 1) for train in (True, False)]
    except OSError as error:
        raise ConfigError(
            f"{source}: must be a folder with train/<class>/ and test/<class>/, or <class>/, a "
            "Parquet file, a folder of them, or what Hugging Face's save_to_disk has written"
        ) from error
    train, test = (mix(images.samples) for images in found)
    num_val = round(val_share * len(train))
    if not 0 < num_val < len(train):
        raise ConfigError(
            f"--val {val_share}: must leave some of the {len(train)} training images for training "
            "and some for validation"
        )
    columns = {"image": pa.large_binary(), "label": pa.int64(), CHECKSUM: pa.uint32()}
    schema = pa.schema(columns.items(), {"classes": json.dumps(found[0].classes)})

    def part(name: str, samples: list[tuple[str, int]]) -> Part:
        def read(start: int) -> Iterator[pa.Table]:
            for first in range(start, len(samples), IMAGES_AT_ONCE):
                some = samples[first : first + IMAGES_AT_ONCE]
                contents = [Path(path).read_bytes() for path, _ in some]
                numbers = [label for _, label in some]
                yield pa.table([contents, numbers, [*map(checksum, contents, numbers)]], schema)

        return Part(name, schema, len(samples), digest_of([Path(p) for p, _ in samples]), read)

    return [part("train", train[num_val:]), part("val", train[:num_val]), part("test", test)]


def mix(samples: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The samples in a random order that is always the same."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return [samples[index] for index in order.tolist()]


def digest_of(files: list[Path]) -> str:
    """Of names and sizes, which tell whether the source is still the same."""
    lines = (f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files)
    return sha256("\n".join(lines).encode()).hexdigest()


def write_table(part: Part, uri: str) -> Iterator[int]:
    """Write the rows that the table does not have yet, and yield how many it has.

    Each piece is read back and compared before the next one is written. A conversion that was
    killed leaves whole pieces only, and the same command goes on after them.

    Raises:
        ConfigError: if there is a table that comes from something else.
        RunError: if the table cannot be written, or does not give back what was written.
    """
    facts = {NUM_ROWS: str(part.num_rows).encode(), SOURCE: part.digest.encode()}
    schema = part.schema.with_metadata((part.schema.metadata or {}) | facts)
    try:
        table = lance.dataset(uri)
    except ValueError:
        table = lance.write_dataset([], uri, schema=schema)
    if (found := table.schema.metadata or {}).get(SOURCE) != facts[SOURCE]:
        raise ConfigError(
            f"{uri}: is a table of other data ({found.get(NUM_ROWS, b'?').decode()} rows); name "
            "another target, or remove it"
        )
    done = table.count_rows()
    yield done
    for piece in part.read(done):
        rows = piece.cast(part.schema).replace_schema_metadata(schema.metadata)
        try:
            table = lance.write_dataset(rows, table, mode="append")
            written = table.take(list(range(done, done + len(rows))))
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(f"{uri}: cannot be written: {first_line(error)}") from error
        if not written.equals(rows.replace_schema_metadata(written.schema.metadata)):
            raise RunError(
                f"{uri}: rows {done} to {done + len(rows)} were read back different from what was "
                "written; the disk or the store is faulty. Remove the table and repeat the command"
            )
        done += len(rows)
        yield done
