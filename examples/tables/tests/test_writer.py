"""Tables that are written: complete, verified, resumed, and never over another one."""

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from examples.tables import writer
from examples.tables.datamodule import checksum
from examples.tables.tests.conftest import FEATURES, data_of, lance_rows, save_to_disk, write
from examples.tables.writer import find_parts, write_table
from samestep import BatchLoader, ConfigError, LanceRows, RunError
from tests.conftest import run


def test_a_folder_becomes_three_tables_that_hold_its_files(photos: Path, tables: Path):
    files = {path.read_bytes(): path for path in photos.rglob("*.png")}
    found: list[Path] = []
    for name, num_rows in {"train": 360, "val": 40, "test": 100}.items():
        table = lance.dataset(tables / f"{name}.lance").to_table()
        assert table.num_rows == num_rows
        assert json.loads(table.schema.metadata[b"classes"]) == [str(n) for n in range(10)]
        paths = [files[content] for content in table["image"].to_pylist()]
        labels = table["label"].to_pylist()
        assert [int(path.parent.name) for path in paths] == labels
        checksums = map(checksum, table["image"].to_pylist(), labels)
        assert table["crc32"].to_pylist() == [*checksums]
        assert {path.parts[-3] for path in paths} == {"test" if name == "test" else "train"}
        found += paths
    assert sorted(found) == sorted(files.values())
    # Neighbours are of unlike classes, as in any random order.
    labels = lance.dataset(tables / "train.lance").to_table()["label"].to_numpy()
    assert (labels[1:] == labels[:-1]).mean() < 0.2


def test_a_stopped_conversion_resumes(
    photos: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(writer, "IMAGES_AT_ONCE", 100)
    part, target = find_parts(photos, 0.1)[0], str(tmp_path / "train.lance")
    assert list(islice(write_table(part, target), 3)) == [0, 100, 200]
    with pytest.raises(ConfigError, match=r"holds 200 of 360 rows; repeat the conversion"):
        LanceRows(target)
    assert list(write_table(part, target)) == [200, 300, 360]
    assert list(write_table(part, target)) == [360]
    assert lance.dataset(target).to_table() == lance.dataset(tables / "train.lance").to_table()


def test_a_table_of_other_data_is_not_overwritten(photos: Path, tables: Path, tmp_path: Path):
    shutil.copytree(photos, tmp_path / "photos")
    next((tmp_path / "photos/train").rglob("*.png")).unlink()
    with pytest.raises(ConfigError, match=r"train\.lance: is a table of other data \(360 rows\)"):
        write(tmp_path / "photos", str(tables))
    assert len(LanceRows(f"{tables}/train.lance")) == 360


def test_rows_that_are_read_back_different_end_the_conversion(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    take = lance.LanceDataset.take

    def flip(self: lance.LanceDataset, ids: Any, **options: Any) -> pa.Table:
        table = take(self, ids, **options)
        return table.set_column(1, "label", pa.compute.add(table["label"], 1))

    monkeypatch.setattr(lance.LanceDataset, "take", flip)
    with pytest.raises(RunError, match=r"rows 0 to 360 were read back different"):
        write(photos, str(tmp_path))


@pytest.mark.program
@pytest.mark.parametrize("kind", ["folder", "datasets"])
def test_tables_of_others_keep_their_columns(tmp_path: Path, kind: str):
    rows = pa.table({
        "tokens": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)),
        "text": ["a", "b", "c"], "weight": [0.5, 1.5, 2.5],
    })  # fmt: skip
    source = tmp_path / "source"
    if kind == "datasets":
        save_to_disk(rows, source)
    else:
        source.mkdir()
        parquet.write_table(rows[:2], source / "0.parquet")
        parquet.write_table(rows[2:], source / "1.parquet")
    target = str(tmp_path / "rows.lance")
    done = run("-m", "examples.tables.convert", str(source), target)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}: {len(rows)} rows, read back and compared\n"
    batch = next(iter(BatchLoader(LanceRows(target), len(rows))))
    assert batch["tokens"].tolist() == rows["tokens"].to_pylist()
    assert batch["weight"].tolist() == rows["weight"].to_pylist()
    assert batch["text"] == rows["text"].to_pylist()
    assert [
        len(part)
        for part in LanceRows(target, ["text", "tokens"])[torch.tensor([], dtype=int)].values()
    ] == [0, 0]


def test_splits_of_hugging_face_become_tables_with_their_classes(folders: Path, tmp_path: Path):
    rows = lance_rows(folders, tmp_path / "a")
    for part in ("train", "validation", "test"):  # as the Hub names them
        table = rows[part.removesuffix("idation")]
        table = table.replace_schema_metadata({"huggingface": FEATURES})
        (tmp_path / "hub").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / f"hub/{part}-00000-of-00001.parquet")
    assert lance_rows(tmp_path / "hub", tmp_path / "b") == rows
    data = data_of(tmp_path / "b", "lance")
    assert data.class_names == [*"0123456789"]
    raw = next(iter(data.val_dataloader()))
    mapped = next(iter(data_of(folders, "hf", ["data.tables=[train,val,test]"]).val_dataloader()))
    assert all(map(torch.equal, raw, mapped))
    with pytest.raises(ConfigError, match=r"Parquet has no random access; convert it once with"):
        data_of(tmp_path / "hub", "hf")


@pytest.mark.program
def test_wrong_arguments_are_one_message(photos: Path, tmp_path: Path):
    done = run("-m", "examples.tables.convert", "nowhere", f"{photos}/x")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nowhere: must be a folder with train/<class>/" in done.stderr
    (tmp_path / "photos/train/cat").mkdir(parents=True)
    with pytest.raises(ConfigError, match="photos: must be a folder with train/<class>/ and test/"):
        find_parts(tmp_path / "photos", 0.1)
    with pytest.raises(ConfigError, match=r"--val 0.0: must leave some of the 400 training images"):
        find_parts(photos, 0.0)
