"""Tables that are read: which rows, how, and what is wrong with them."""

import pickle
import re
import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

from examples.tables.datamodule import TableImages, checksum
from examples.tables.tests.conftest import SIZES, data_of, lance_rows, save_to_disk, write
from samestep import ArrowRows, BatchLoader, ConfigError, LanceRows, RunError, build_datamodule
from samestep.hydra.compose import check
from tests.conftest import run


def test_every_tenth_image_is_held_out_where_no_table_is_for_validation(folders: Path):
    data = data_of(folders, "hf")
    parts = [data.train_set, data.val_set]
    ids = [part.rows_at(torch.arange(len(part))).tolist() for part in parts]
    assert sorted(ids[0] + ids[1]) == [*range(360)]
    assert ids[1] == [*range(9, 360, 10)]
    all_images = TableImages(data.rows, 1, 8)[torch.tensor([10, 222])]
    assert all(map(torch.equal, data.train_set[torch.tensor([9, 200])], all_images))


def test_neighbours_that_are_mixed_are_read_together(tables: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = "data.shuffle={_target_: samestep.data.order.Blocks, size: 16, at_once: 4}"
    data, read = data_of(tables, "lance", [blocks, "data.global_batch_size=24"]), []
    data.crop_padding = 0
    read_block = LanceRows._read_block
    monkeypatch.setattr(
        LanceRows, "_read_block", lambda *args: read.append(args[1]) or read_block(*args)
    )
    loader = data.train_dataloader()
    batches = list(loader)
    assert sorted(read) == list(range(0, 360, 16))
    assert len(batches) == 15
    for batch, place in zip(batches, loader.order, strict=True):
        row_by_row = data.train_set[place.ids]
        assert all(map(torch.equal, batch, row_by_row))


def test_mapped_files_are_checked(folders: Path, tmp_path: Path):
    shutil.copytree(folders, tmp_path / "rows")
    rows = ArrowRows(str(tmp_path / "rows/train"), ["label"])
    all_labels = lance_rows(folders, tmp_path / "lance")["train"]["label"].to_pylist()
    order = torch.randperm(360, generator=torch.Generator().manual_seed(0))
    expected = [all_labels[id] for id in order.tolist()]
    assert rows[order]["label"].tolist() == expected
    assert len(pickle.dumps(rows)) < 3000
    assert pickle.loads(pickle.dumps(rows))[order]["label"].tolist() == expected
    with pytest.raises(ConfigError, match=r"train: has no column x; it has image, label"):
        ArrowRows(rows.uri, ["x"])

    begun = data_of(tmp_path / "rows", "hf").state_dict()
    (tmp_path / "rows/train/state.json").write_text(
        (tmp_path / "rows/train/state.json").read_text().replace("train", "other")
    )
    with pytest.raises(ConfigError, match=r"rows than the run began with; continue with those fil"):
        data_of(tmp_path / "rows", "hf").load_state_dict(begun)
    content = rows.files[1].read_bytes()
    rows.files[1].write_bytes(content[:-400])
    with pytest.raises(ConfigError, match=r"train: .*data-00001-of-00002.arrow is incomplete"):
        ArrowRows(rows.uri)
    with pytest.raises(ConfigError, match=r"nowhere: is no folder that save_to_disk has written"):
        ArrowRows("nowhere")


def test_mapped_rows_take_no_memory_of_the_process(tmp_path: Path):
    values = np.random.default_rng(0).integers(255, size=(1000, 40_000), dtype=np.uint8)
    rows = pa.table({"x": pa.array([*values], pa.list_(pa.uint8()))})
    save_to_disk(pa.concat_tables([rows] * 4), tmp_path / "rows")  # 160 MB
    del rows, values
    before, most = anonymous_memory(), 0
    decoded = ArrowRows(str(tmp_path / "rows"), decode=len)
    for ids in torch.randperm(4000).split(100):
        assert decoded[ids] == 100
        most = max(most, anonymous_memory())
    assert most - before < 50e6


def anonymous_memory() -> int:
    """Bytes of this process that the system cannot take back."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", text)[0])


@pytest.mark.program
def test_a_run_resumes_with_the_version_that_it_started_with(tables: Path, tmp_path: Path):
    root = tmp_path / "tables"
    shutil.copytree(tables, root)
    command = ["train.py", *SIZES, f"data.root={root}", f"run_root={tmp_path}"]
    assert run(*command, "trainer.max_epochs=1", RUN_ID="mine").returncode == 0
    version = LanceRows(f"{root}/train.lance").version
    rows = lance.dataset(root / "train.lance")
    lance.write_dataset(rows.take([0, 1, 2]), rows, mode="append")

    done = run(*command, "trainer.max_epochs=2", RUN_ID="mine")
    assert done.returncode == 2
    assert f"continue with data.version={version}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = run(*command, f"data.version={version}", "trainer.max_epochs=2", RUN_ID="mine")
    assert done.returncode == 0, done.stderr


def test_forked_processes_are_told_to_be_threads(tables: Path):
    loader = BatchLoader(LanceRows(f"{tables}/train.lance"), 32, num_workers=1)
    with pytest.raises(ConfigError, match=r"train\.lance: Lance cannot be read by a process that"):
        next(iter(loader))


def test_an_image_or_label_that_has_changed_names_its_row(tables: Path, tmp_path: Path):
    shutil.copytree(tables, tmp_path / "tables")
    (path,) = (tmp_path / "tables/test.lance/data").iterdir()
    image = lance.dataset(tmp_path / "tables/test.lance").take([7])["image"][0].as_py()
    content = path.read_bytes()
    assert content.count(image) == 1
    path.write_bytes(content.replace(image, image[:-20] + b"x" + image[-19:]))
    test = data_of(tmp_path / "tables", "lance").test_set
    test[torch.tensor([6, 8])]
    with pytest.raises(RunError, match=r"test\.lance: row 7 is damaged: it has another checksum"):
        test[torch.tensor([6, 7])]
    assert checksum(image, 1) != checksum(image, 2)


def test_an_image_that_cannot_be_decoded_names_its_row(photos: Path, tmp_path: Path):
    shutil.copytree(photos, tmp_path / "photos")
    path = next((tmp_path / "photos/train").rglob("*.png"))
    path.write_bytes(b"no image")
    write(tmp_path / "photos", str(tmp_path))
    table = lance.dataset(tmp_path / "train.lance").to_table()
    row = table["image"].to_pylist().index(b"no image")
    with pytest.raises(RunError, match=f"train.lance: row {row}: cannot identify image file"):
        data_of(tmp_path, "lance").train_set[torch.arange(row, row + 1)]


def test_labels_that_are_no_numbers_are_one_message(tmp_path: Path):
    uri = str(tmp_path / "train.lance")
    lance.write_dataset(pa.table({"image": [b"x"], "kind": ["cat"]}), uri)
    images = TableImages(LanceRows(uri, ["image", "kind"]), 1, 8)
    with pytest.raises(
        ConfigError, match=r"labels in its column kind are no numbers, such as 'cat'"
    ):
        images[torch.tensor([0])]


@pytest.mark.parametrize("word", ["data.columns=[image]", "data.tables=[train.lance]"])
def test_other_numbers_of_names_are_rejected(tables: Path, word: str):
    with pytest.raises(ConfigError, match="columns must be two names, and tables two or three"):
        build_datamodule(check([*SIZES, f"data.root={tables}", word]))


def test_tables_of_another_number_of_classes_are_rejected(tables: Path):
    with pytest.raises(ConfigError, match="the model knows 3 classes, and the data have"):
        data_of(tables, "lance", ["data.num_classes=3"])
