"""500 real images in a folder, in Lance tables and in Hugging Face datasets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hydra.utils import instantiate
from PIL import Image
from sklearn.datasets import load_digits

from examples.tables.writer import find_parts, write_table
from samestep.hydra.compose import check

SIZES = [
    "data=lance", "data.num_classes=10", "data.num_channels=1", "data.image_size=8",
    "data.mean=[0.3]", "data.std=[0.4]", "data.flip=false", "data.crop_padding=1",
    "data.global_batch_size=32", "data.num_threads=2", "model=mlp", "trainer.accelerator=cpu",
    "trainer.max_epochs=3", "report=false",
]  # fmt: skip


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


def lance_rows(source: Path, target: Path) -> dict[str, pa.Table]:
    write(source, str(target))
    names = ("train", "val", "test")
    return {name: lance.dataset(target / f"{name}.lance").to_table() for name in names}


def data_of(root: Path, data: str, more: Sequence[str] = ()) -> Any:
    words = [*SIZES, f"data={data}", f"data.root={root}", *more]
    found = instantiate(check(words).data)
    found.setup("fit")
    return found
