"""Blocks of a Lance table are read once, and a batch has the same rows as without them."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from library.tests.kit import Clock
from samestep.data import lance as lance_rows
from samestep.data.lance import LanceRows
from samestep.data.loader import BatchLoader
from samestep.data.order import Blocks
from samestep.errors import ConfigError, RunError
from samestep.ranks import environment

BLOCKS = Blocks(size=7, at_once=3)


class Counted(LanceRows):
    """Counts what it reads."""

    def __init__(self, uri: str, **options: Any) -> None:
        self.blocks_read: list[int] = []
        self.most_held = 0
        super().__init__(uri, **options)

    def _read_block(self, first: int, num_rows: int) -> pa.RecordBatch:
        self.blocks_read.append(first)
        return super()._read_block(first, num_rows)

    def __getitem__(self, ids: Tensor) -> Any:
        self.most_held = max(self.most_held, len(self.blocks))
        return super().__getitem__(ids)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """250 rows in files of 60, of which every 25th was deleted; the last block is short."""
    numbers = range(260)
    columns = {
        "text": [f"{number:0{number % 9 + 1}}" if number % 11 else None for number in numbers],
        "pair": pa.array([[number, -number] for number in numbers], pa.list_(pa.int32(), 2)),
        "number": numbers,
        "bytes": [bytes([number % 256]) * (number % 5) for number in numbers],
        "words": [["a"] * (number % 3) for number in numbers],
    }
    table = lance.write_dataset(pa.table(columns), tmp_path / "rows", max_rows_per_file=60)
    table.delete("number % 26 = 3")
    return str(tmp_path / "rows")


def test_a_store_that_is_away_is_read_again_for_three_minutes(uri: str, monkeypatch):
    clock, rows = Clock(), LanceRows(uri)
    monkeypatch.setattr(lance_rows, "time", clock)
    asked_at: list[float] = []

    def read(back_at: float) -> str:
        asked_at.append(clock.now)
        if clock.now < back_at:
            raise OSError("after max_retries: 503")
        return "rows"

    began = clock.now
    assert rows._patiently(read, began + 10) == "rows"
    assert [moment - began for moment in asked_at] == [0, 1, 3, 7, 15]
    began = clock.now
    asked_at.clear()
    with pytest.raises(OSError, match="503"):
        rows._patiently(read, began + 1000)
    assert [moment - began for moment in asked_at] == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151]
    monkeypatch.setattr(clock, "sleep", pytest.fail)
    with pytest.raises(ValueError, match="no such row"):
        rows._patiently(int, "no such row")


def plain(batches: Iterable[Any]) -> list[Any]:
    return [
        {name: v.tolist() if isinstance(v, Tensor) else v for name, v in batch.items()}
        for batch in batches
    ]


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("kept_as", ["values", "arrow"])
def test_blocks_give_the_rows_that_take_gives_and_each_is_read_once(
    uri: str, kept_as: str, num_threads: int
):
    # Blocks with lists of any length are kept as Arrow's.
    columns = ["bytes", "text", "pair", "number"] + ["words"] * (kept_as == "arrow")
    rows = Counted(uri, columns=columns)
    rows.blocks_ahead = 1  # a window is more
    loader = BatchLoader(rows, 8, shuffle=BLOCKS, seed=1, num_threads=num_threads)
    for epoch, first in [(0, 0), (1, 0), (1, 9)]:  # the last one continues within an epoch
        rows.blocks_read.clear()
        loader.start_at(epoch, first)
        batches = plain(loader)
        loader.start_at(epoch, first)
        taken = [rows.table.take(p.ids.tolist(), columns=rows.columns) for p in loader.order]
        assert batches == plain(map(rows.decode, taken))
        assert len(batches) == 32 - first
        assert sorted(set(rows.blocks_read)) == sorted(rows.blocks_read)
        if not first:
            assert sorted(rows.blocks_read) == list(range(0, 250, 7))
        assert not rows.blocks
    # Of two windows, and of the batches that threads read ahead.
    assert rows.most_held <= (4 if num_threads else 3) * BLOCKS.at_once


def test_rows_that_are_not_expected_are_read_beside_the_blocks(uri: str):
    rows = LanceRows(uri)
    loader = BatchLoader(rows, 8, shuffle=BLOCKS)
    batches = iter(loader)
    next(batches)
    assert rows.blocks
    ids = torch.tensor([249, 0, 0, 120])
    assert plain([rows[ids]]) == plain([rows.decode(rows.table.take(ids.tolist()))])
    copied = pickle.loads(pickle.dumps(rows))
    assert not copied.blocks
    assert plain([copied[ids]]) == plain([rows[ids]])
    batches.close()  # as Lightning does when a run ends within an epoch
    assert not rows.blocks


def test_blocks_that_take_much_memory_and_those_of_many_ranks_are_not_read(
    uri: str, monkeypatch: pytest.MonkeyPatch
):
    rows = Counted(uri)
    some = plain(BatchLoader(rows, 8, shuffle=BLOCKS))
    assert rows.blocks_read
    rows.blocks_ahead, most_near = 30, rows.most_held
    assert plain(BatchLoader(rows, 8, shuffle=BLOCKS)) == some
    assert rows.most_held > 30 > most_near
    num_bytes = sum(file.stat().st_size for file in Path(uri, "data").iterdir())
    monkeypatch.setattr(
        lance_rows, "MAX_BLOCK_BYTES", 45 * num_bytes // 250
    )  # two windows of 21 rows
    rows.most_held = 0
    assert plain(BatchLoader(rows, 8, shuffle=BLOCKS)) == some
    assert 0 < rows.most_held <= 3 * BLOCKS.at_once
    rows.blocks_read.clear()
    monkeypatch.setattr(environment, "world_size", lambda: 3)
    assert len(next(iter(BatchLoader(rows, 8, shuffle=BLOCKS)))["number"]) == 3
    monkeypatch.undo()
    monkeypatch.setattr(lance_rows, "MAX_BLOCK_BYTES", 2 * 3 * 7 * 20)  # 20 bytes a row
    assert plain(BatchLoader(rows, 8, shuffle=BLOCKS)) == some
    assert not rows.blocks_read


def test_a_number_that_is_missing_is_an_error_and_not_another_number(tmp_path: Path):
    columns = {"label": [*range(20), None], "score": [None, *map(float, range(20))]}
    lance.write_dataset(pa.table(columns), tmp_path / "rows")
    rows = LanceRows(str(tmp_path / "rows"))
    assert rows[torch.tensor([3])]["score"].item() == 2
    message = "column label: 1 values are missing, and a tensor of int64 has"
    with pytest.raises(ConfigError, match=message):
        rows[torch.tensor([3, 20])]
    with pytest.raises(ConfigError, match=message):
        list(BatchLoader(rows, 8, shuffle=BLOCKS))
    decode = pa.Table.to_pylist
    assert LanceRows(rows.uri, decode=decode)[torch.tensor([20])] == [{"label": None, "score": 19}]
    scores = [b["score"] for b in BatchLoader(LanceRows(rows.uri, ["score"]), 8, shuffle=BLOCKS)]
    assert torch.cat(scores).nansum() == 190


def test_a_block_that_cannot_be_read_is_an_error_that_names_the_table(uri: str):
    rows = LanceRows(uri)
    for file in Path(uri, "data").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RunError, match=rf"^{uri}: version \d+ cannot be read: "):
        list(BatchLoader(rows, 8, shuffle=BLOCKS))
