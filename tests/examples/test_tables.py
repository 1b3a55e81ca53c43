"""data=lance and data=hf: from an S3 server, on other ranks, after a kill and with faults."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.tables.tests import conftest
from examples.tables.tests.conftest import SIZES, write
from labs.faults.lab import Laboratory
from library.tests.kit import Clock
from samestep import evaluate, export, predict
from samestep.data import lance
from samestep.data.lance import LanceRows
from samestep.errors import ConfigError, RunError
from tests.conftest import final_metrics, run, run_ranks
from tests.project.test_train import history
from tests.s3_server import harm, s3_server, use_bucket

photos, tables, folders = conftest.photos, conftest.tables, conftest.folders  # fixtures


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as variables:
        yield variables


@pytest.fixture
def s3(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    use_bucket(server, "images", monkeypatch)
    return server


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


@pytest.mark.program
@pytest.mark.parametrize("data", ["lance", "hf"])
def test_a_run_is_exact_on_other_ranks_and_after_a_kill(
    photos: Path, folders: Path, whole: Path, s3: dict[str, str], tmp_path: Path, data: str
):
    """From S3 and from mapped files; killed on one rank, then on three, and ended on two."""
    if data == "lance":
        write(photos, "s3://images/exact")
        where = ["data.root=s3://images/exact"]
    else:
        where = ["data=hf", f"data.root={folders}", "data.tables=[train,val,test]"]
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


@pytest.mark.program
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


@pytest.mark.program
def test_a_store_that_restarts_is_waited_for(photos: Path, s3: dict[str, str], monkeypatch):
    """Longer than Lance alone waits. How often it is asked: library/tests/data/test_lance.py."""
    write(photos, "s3://images/restarts")
    clock = Clock()
    back_at = clock.now
    monkeypatch.setattr(lance, "time", clock)
    options = {"client_max_retries": "1"}
    with harm(s3, lambda *_: 503 if clock.now < back_at else None) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        rows = LanceRows("s3://images/restarts/train.lance", storage_options=options)
        back_at = clock.now + 13
        assert len(rows[torch.arange(300)]["label"]) == 300
        assert clock.now == back_at + 2, "after 1, 3, 7 and 15 s"
        # It is not waited for where a run begins, because its address may be wrong.
        back_at, began = clock.now + 40, clock.now
        with pytest.raises(ConfigError, match=r"restarts/train\.lance: cannot be opened: "):
            LanceRows("s3://images/restarts/train.lance", storage_options=options)
        assert clock.now == began


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


@pytest.mark.program
def test_the_scripts_for_runs_know_these_data(whole: Path, photos: Path):
    image = next((photos / "test").rglob("*.png"))
    for script, *words in ([evaluate], [predict, str(image)], [export]):
        assert script.main([str(whole), *words]) == 0
    assert (whole / "export/model.pt2").exists()
