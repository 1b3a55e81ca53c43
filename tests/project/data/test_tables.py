"""data=lance and data=hf: converted, read from a folder and an S3 server, with planted faults."""

import json
import pickle
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from hydra.utils import instantiate
from PIL import Image
from pyarrow import parquet
from sklearn.datasets import load_digits

from labs.faults.lab import Laboratory
from project.data import convert
from project.data import tables as tables_module
from project.data.convert import find_parts, write_table
from samestep.data.arrow import ArrowRows
from samestep.data.lance import LanceRows
from samestep.data.loader import BatchLoader
from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check
from scripts import evaluate, export, predict
from tests.conftest import NO_PICTURES, final_metrics, run, run_ranks
from tests.project.test_train import history
from tests.s3_server import harm, s3_server, use_bucket


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 real images, 400 of them for training, as data=folder wants them."""
    digits, root = load_digits(), tmp_path_factory.mktemp("photos")
    for number, (pixels, label) in enumerate(zip(digits.images[:500], digits.target, strict=False)):
        folder = root / ("train" if number % 5 else "test") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def tables(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    write(photos, str(root))
    return root


def write(source: Path, target: str) -> None:
    for part in find_parts(source, 0.1):
        list(write_table(part, f"{target}/{part.name}.lance"))


@pytest.fixture(scope="module")
def folders(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of ``tables``, as ``DatasetDict.save_to_disk`` writes them."""
    root = tmp_path_factory.mktemp("folders")
    (root / "dataset_dict.json").write_text('{"splits": ["train", "val", "test"]}')
    for part in ("train", "val", "test"):
        rows = lance.dataset(tables / f"{part}.lance").to_table()
        save_to_disk(rows.replace_schema_metadata({"huggingface": FEATURES}), root / part)
    return root


FEATURES = json.dumps({"info": {"features": {"label": {"names": [*"0123456789"]}}}})


def save_to_disk(rows: pa.Table, folder: Path) -> None:
    """Write what ``datasets`` 5.2 does: two files, images as bytes with a path."""
    folder.mkdir(parents=True)
    if "image" in rows.column_names:
        images = [{"bytes": content, "path": None} for content in rows["image"].to_pylist()]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        rows = rows.set_column(0, "image", pa.array(images, kind))
    half, files = len(rows) // 2, []
    for number, part in enumerate((rows[:half], rows[half:])):
        files.append({"filename": f"data-{number:05}-of-00002.arrow"})
        with pa.ipc.new_stream(folder / files[-1]["filename"], rows.schema) as stream:
            stream.write_table(part, max_chunksize=100)
    state = {"_data_files": files, "_fingerprint": folder.name}
    (folder / "state.json").write_text(json.dumps(state))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as variables:
        yield variables


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    use_bucket(server, "images", monkeypatch)
    return server


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
        checksums = map(tables_module.checksum, table["image"].to_pylist(), labels)
        assert table["crc32"].to_pylist() == [*checksums]
        assert {path.parts[-3] for path in paths} == {"test" if name == "test" else "train"}
        found += paths
    assert sorted(found) == sorted(files.values())
    # Neighbours are of unlike classes, as in any random order.
    labels = lance.dataset(tables / "train.lance").to_table()["label"].to_numpy()
    assert (labels[1:] == labels[:-1]).mean() < 0.2


def test_a_conversion_that_was_stopped_goes_on(
    photos: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(convert, "IMAGES_AT_ONCE", 100)
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
    done = run("scripts/convert.py", str(source), target)
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
    raw, _ = next(iter(data.val_dataloader()))
    mapped, _ = next(iter(data_of(folders, "hf", ["data.tables.val=val"]).val_dataloader()))
    assert torch.equal(raw.images, mapped.images)
    assert torch.equal(raw.labels, mapped.labels)
    with pytest.raises(ConfigError, match=r"Parquet has no random access; convert it once with"):
        data_of(tmp_path / "hub", "hf")


def lance_rows(source: Path, target: Path) -> dict[str, pa.Table]:
    write(source, str(target))
    names = ("train", "val", "test")
    return {name: lance.dataset(target / f"{name}.lance").to_table() for name in names}


def data_of(root: Path, data: str, more: Sequence[str] = ()) -> Any:
    words = [*SIZES, f"data={data}", f"data.root={root}", *more]
    found = instantiate(check(words).data)
    found.setup("fit")
    return found


def test_every_tenth_image_is_held_out_where_no_table_is_for_validation(folders: Path):
    data = data_of(folders, "hf")
    parts = [data.train_set, data.val_set]
    ids = [part[torch.arange(len(part))].ids.tolist() for part in parts]
    assert sorted(ids[0] + ids[1]) == [*range(360)]
    assert ids[1] == [*range(9, 360, 10)]
    assert data.train_set[torch.tensor([9, 200])].ids.tolist() == [10, 222]


def test_neighbours_that_are_mixed_are_read_together(tables: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = "data.shuffle={_target_: samestep.data.order.Blocks, size: 16, at_once: 4}"
    data, read = data_of(tables, "lance", [blocks, "data.global_batch_size=24"]), []
    read_block = LanceRows._read_block
    monkeypatch.setattr(
        LanceRows, "_read_block", lambda *args: read.append(args[1]) or read_block(*args)
    )
    loader = data.train_dataloader()
    batches = [batch for batch, _ in loader]
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


def test_wrong_arguments_are_one_message(photos: Path):
    done = run("scripts/convert.py", "nowhere", f"{photos}/x")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nowhere: must be a folder with train/<class>/" in done.stderr
    with pytest.raises(ConfigError, match=r"--val 0.0: must leave some of the 400 training images"):
        find_parts(photos, 0.0)


SIZES = [
    "data=lance", "data.num_classes=10", "data.num_channels=1", "data.image_size=8",
    "data.mean=[0.3]", "data.std=[0.4]", "data.flip=false", "data.crop_padding=1",
    "data.global_batch_size=32", "data.num_threads=2", "model=mlp", "trainer.accelerator=cpu",
    "trainer.max_epochs=3", "report=false", NO_PICTURES,
]  # fmt: skip


def steps(folder: Path) -> dict[tuple[int, int], list[list[int]]]:
    """For each epoch and batch, the ids of the global batch in each attempt at it."""
    found: dict[tuple[int, int], dict[float, dict[int, list[int]]]] = {}
    for path in folder.glob("rank-*.jsonl"):
        rank = int(path.stem.removeprefix("rank-"))
        for line in map(json.loads, path.read_text().splitlines()):
            attempts = found.setdefault((line["epoch"], line["batch"]), {})
            attempts.setdefault(line["world_size"], {})[rank] = line["ids"]
    return {
        key: [[id for rank in sorted(ranks) for id in ranks[rank]] for ranks in attempts.values()]
        for key, attempts in found.items()
    }


@pytest.fixture(scope="module")
def whole(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a folder of Lance tables that was left alone, beside its ``records-whole``."""
    root = tmp_path_factory.mktemp("whole")
    command = ["train.py", *SIZES, *Laboratory(root, SIZES).saboteur("whole", [])]
    done = run(*command, f"data.root={tables}", f"run_root={root}", RUN_ID="whole")
    assert done.returncode == 0, done.stderr
    return root / "whole"


@pytest.mark.parametrize("data", ["lance", "hf"])
def test_a_run_is_exact_on_other_ranks_and_after_a_kill(
    photos: Path, folders: Path, whole: Path, s3: dict[str, str], tmp_path: Path, data: str
):
    """From S3 and from mapped files; killed on one rank, then on three, and ended on two."""
    if data == "lance":
        write(photos, "s3://images/exact")
        where = ["data.root=s3://images/exact"]
    else:
        where = ["data=hf", f"data.root={folders}", "data.tables.val=val"]
    faults = ["kill step 14 0", "kill step 25 1"]  # of 11 an epoch
    harm = Laboratory(tmp_path, SIZES).saboteur("harmed", faults)
    for nodes in ((), (3,), (2,)):
        words = [*SIZES, *where, *harm, f"run_root={tmp_path}"]
        done = run_ranks("train.py", *words, nodes=nodes, RUN_ID="harmed")
    assert done.returncode == 0, done.stderr

    expected, found = steps(whole.parent / "records-whole"), steps(tmp_path / "records-harmed")
    assert len(expected) == 33
    for key, batches in found.items():
        assert all(batch == expected[key][0] for batch in batches)
    assert found.keys() == expected.keys()
    assert {len(batches) for batches in found.values()} == {1, 2}  # some steps were repeated
    lines = [
        line for path in (tmp_path / "records-harmed").glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]  # fmt: skip
    assert {json.loads(line)["world_size"] for line in lines} == {1, 2, 3}
    ours, theirs = (
        [{name: float(value) for name, value in row.items() if value} for row in history(path)]
        for path in (tmp_path / "harmed", whole)
    )
    for row, expected_row in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-4)
    assert final_metrics(tmp_path / "harmed")["test/accuracy"] > 0.3


def test_a_store_that_fails_for_a_while_is_asked_again(
    photos: Path, s3: dict[str, str], monkeypatch
):
    write(photos, "s3://images/faulty")
    order = torch.randperm(360, generator=torch.Generator().manual_seed(0))
    expected = LanceRows("s3://images/faulty/train.lance")[order]
    num_faults, num_requests = {503: 0, 500: 0, -1: 0}, 0

    def fault(method: str, path: str) -> int | None:
        nonlocal num_requests
        num_requests += 1
        time.sleep(0.005)
        for status, every in ((503, 3), (500, 5), (-1, 7)):
            if num_requests % every == 0:
                num_faults[status] += 1
                return status
        return None

    with harm(s3, fault) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        rows = LanceRows("s3://images/faulty/train.lance")
        found = [rows[ids] for ids in order.split(40)]
    assert min(num_faults.values()) > 0
    assert [n for part in found for n in part["label"].tolist()] == expected["label"].tolist()
    assert [image for part in found for image in part["image"]] == expected["image"]


def test_a_store_that_restarts_is_waited_for(photos: Path, s3: dict[str, str], monkeypatch):
    """Lance alone gives up after ten seconds."""
    write(photos, "s3://images/restarts")
    back_at = 0.0
    with harm(s3, lambda *_: 503 if time.monotonic() < back_at else None) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        rows = LanceRows("s3://images/restarts/train.lance")
        back_at = time.monotonic() + 13
        assert len(rows[torch.arange(300)]["label"]) == 300
        # It is not waited for where a run begins, because its address may be wrong.
        back_at = time.monotonic() + 40
        with pytest.raises(ConfigError, match=r"restarts/train\.lance: cannot be opened: "):
            LanceRows("s3://images/restarts/train.lance")


@pytest.mark.parametrize("harm_done", ["missing", "gone"])
def test_what_a_store_cannot_give_is_one_message(
    photos: Path, s3: dict[str, str], tmp_path: Path, monkeypatch, harm_done: str
):
    import fsspec

    root = f"s3://images/{harm_done}"
    write(photos, root)
    fs = fsspec.filesystem("s3", skip_instance_cache=True)
    (name,) = fs.ls(f"images/{harm_done}/train.lance/data")
    rows = LanceRows(f"{root}/train.lance", storage_options={"client_max_retries": "2"})
    why = {
        "missing": rf"version \d+ cannot be read: .*{Path(name).name}",
        "gone": r"cannot be opened: .*127\.0\.0\.1:9",
    }[harm_done]

    def read() -> None:
        if harm_done == "gone":
            LanceRows(rows.uri, storage_options=rows.options)
        rows[torch.arange(300)]

    if harm_done == "missing":
        fs.rm(name)
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises((RunError, ConfigError), match=rf"^{root}/train\.lance: {why}") as raised:
        read()
    assert "\n" not in str(raised.value)
    assert ".rs" not in str(raised.value)


def test_a_run_goes_on_with_the_version_that_it_began_with(tables: Path, tmp_path: Path):
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


def test_the_scripts_for_runs_know_these_data(whole: Path, photos: Path):
    image = next((photos / "test").rglob("*.png"))
    for script, *words in ([evaluate], [predict, str(image)], [export]):
        assert script.main([str(whole), *words]) == 0
    assert (whole / "export/model.pt2").exists()


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
    assert tables_module.checksum(image, 1) != tables_module.checksum(image, 2)


def test_an_image_that_cannot_be_decoded_names_its_row(photos: Path, tmp_path: Path):
    shutil.copytree(photos, tmp_path / "photos")
    path = next((tmp_path / "photos/train").rglob("*.png"))
    path.write_bytes(b"no image")
    write(tmp_path / "photos", str(tmp_path))
    table = lance.dataset(tmp_path / "train.lance").to_table()
    row = table["image"].to_pylist().index(b"no image")
    with pytest.raises(RunError, match=f"train.lance: row {row} cannot be read: it is no image"):
        data_of(tmp_path, "lance").train_set[torch.arange(row, row + 1)]


def test_labels_that_are_no_numbers_are_one_message(tmp_path: Path):
    uri = str(tmp_path / "train.lance")
    lance.write_dataset(pa.table({"image": [b"x"], "kind": ["cat"]}), uri)
    images = tables_module.TableImages(LanceRows(uri, ["image", "kind"]), 1, 8)
    with pytest.raises(
        ConfigError, match=r"labels in its column kind are no numbers, such as 'cat'"
    ):
        images[torch.tensor([0])]
