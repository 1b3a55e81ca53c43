import errno
import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from library.tests.run.settings import make_spec, save
from samestep.errors import ConfigError
from samestep.run import directory as run
from samestep.run import lock, provenance, record
from samestep.run.checkpoint import CheckpointError
from samestep.run.files import WriteError
from samestep.run_spec import RunSpec

Make = Callable[..., RunSpec]
BEGINS = run.Start(finished=False, ckpt_path=None)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the run ``test`` with other values of some keys."""
    # They take a second, and have tests of their own.
    monkeypatch.setattr(provenance, "machine_info", lambda: {"packages": {"torch": "2"}})
    monkeypatch.setattr(provenance, "code_state", lambda code: ("abc", "+two"))
    return lambda changes=None, **facts: make_spec(tmp_path / "test", changes, **facts)


def contents(run_dir: Path) -> dict[str, bytes]:
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != lock.FILE]
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in files}


def test_each_start_is_recorded(spec: Make, tmp_path: Path):
    for word in ("seed=0", "logger.api_key=abc"):
        run.begin(spec(), ["train.py", word])
    known = record.read(tmp_path / "test")
    assert [start["command"] for start in known.starts] == [
        ["train.py", "seed=0"], ["train.py", "logger.api_key=***"],
    ]  # fmt: skip
    assert known.run_id == "test"
    assert known.limits == {"max_epochs": 2, "max_steps": None, "max_time": None}
    assert known.start["git"] == {"commit": "abc", "dirty": True}
    assert [start.get("packages") for start in known.starts] == [None, "torch==2"]
    assert known.packages == {"torch": "2"}
    assert (tmp_path / "test/logs/git.diff").read_text() == "+two"
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text()) == spec().config


def test_name_is_reusable_before_first_checkpoint_or_result(spec: Make):
    run.begin(spec(), [])
    assert run.begin(spec({"seed": 7}), []) == BEGINS
    run.finish(spec({"seed": 7}), {"a": 1.0})
    with pytest.raises(ConfigError, match="seed: 7 -> 0"):
        run.begin(spec(), [])


def test_a_fast_dev_run_leaves_the_name_free(spec: Make, tmp_path: Path):
    fast = spec(saves_nothing=True)
    for _ in range(2):  # it is done again, and not finished before
        assert run.begin(fast, []) == BEGINS
        run.finish(fast, {"a": 1.0})
    assert not (tmp_path / "test/metrics.json").exists()
    assert run.begin(spec({"seed": 7}), []) == BEGINS


def test_another_process_may_be_faster(spec: Make, tmp_path: Path, monkeypatch):
    acquire = lock.acquire

    def lock_late(run_dir: Path) -> None:
        """Another process has begun and finished a run of the same name."""
        monkeypatch.setattr(lock, "acquire", acquire)
        other = spec({"seed": 7})
        run.begin(other, [])
        save(run_dir / "checkpoints/last.ckpt", 1)
        run.finish(other, {"a": 1.0})
        acquire(run_dir)

    monkeypatch.setattr(lock, "acquire", lock_late)
    with pytest.raises(ConfigError, match="seed: 7 -> 0"):
        run.begin(spec(), [])
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text())["seed"] == 7
    assert (tmp_path / "test/metrics.json").exists()


def test_a_run_is_finished_until_a_limit_grows(tmp_path: Path, spec: Make):
    for key, before, now, is_finished in [
        ("max_epochs", 2, 1, True),
        ("max_epochs", 2, 3, False),
        ("max_epochs", -1, 9, True),
        ("max_epochs", 9, -1, False),
        ("max_time", "9:00:00:00", "8:23:59:59", True),
        ("max_time", "9:00:00:00", "10:00:00:00", False),
        ("max_time", {"hours": 1}, {"hours": 2}, False),
        ("max_time", timedelta(hours=1), timedelta(minutes=59), True),
        ("patience of val/loss", 5, 2, True),
        ("patience of val/loss", 5, None, False),
    ]:
        run.begin(spec(limits={key: before}), [])
        run.finish(spec(limits={key: before}), {})
        assert run.begin(spec(limits={key: now}), []).finished is is_finished, (key, before, now)
        shutil.rmtree(tmp_path / "test")
        lock.forget(tmp_path / "test")


def test_a_run_is_not_finished_until_it_has_new_results(spec: Make, tmp_path: Path):
    short, long = spec(limits={"max_epochs": 2}), spec(limits={"max_epochs": 4})
    run.begin(short, [])
    run.finish(short, {"a": 1.0})
    for _ in range(2):  # it is killed on its way to new results
        assert not run.begin(long, []).finished
        assert json.loads((tmp_path / "test/metrics.json").read_text()) == {"a": 1.0}
    run.finish(long, {"a": 2.0})
    assert json.loads((tmp_path / "test/metrics.json").read_text()) == {"a": 2.0}
    assert run.begin(short, []).finished
    assert run.begin(long, []).finished


def test_a_finished_run_may_be_where_nobody_can_write(spec: Make, monkeypatch):
    run.begin(spec(), [])
    run.finish(spec(), {})

    def refuse(run_dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run_dir))

    monkeypatch.setattr(lock, "acquire", refuse)
    assert run.begin(spec(), []).finished


def test_a_run_that_begins_again_has_no_rows_of_before(spec: Make, tmp_path: Path):
    run.begin(spec(), [])
    (tmp_path / "test/metrics.csv").write_text("epoch,step\n")
    last = tmp_path / "test/checkpoints/last.ckpt"
    save(last, 1)
    record.update(tmp_path / "test", record.RUNNING, step=1, best=0.5, monitor="a")
    assert run.begin(spec(), []).ckpt_path == str(last)
    assert (tmp_path / "test/metrics.csv").exists()
    assert record.read(tmp_path / "test").best == 0.5
    last.unlink()
    assert run.begin(spec(), []).ckpt_path is None
    assert not (tmp_path / "test/metrics.csv").exists()
    known = record.read(tmp_path / "test")
    assert (known.monitor, known.best, known.step) == ("", None, None)


def test_only_its_own_results_finish_a_run(spec: Make, tmp_path: Path, caplog):
    run.begin(spec(), [])
    path = tmp_path / "test/metrics.json"
    path.write_text('{"test/accuracy": 0.99}')  # of another run
    assert not run.begin(spec(), []).finished
    run.finish(spec(), {"a": 1.0})
    path.write_text("{}")
    assert not run.begin(spec(), []).finished
    assert "metrics.json cannot be read (it was not written by this run)" in caplog.text


def test_metrics_are_exact_sorted_and_replaced_whole(spec: Make, tmp_path: Path, caplog):
    run.begin(spec(), [])
    run.finish(spec(), {"b": 1 / 3, "a": 1e-45, "c": float("nan"), "d": None})
    assert caplog.messages == [
        "c, d: not a number, and null in metrics.json; check the data for nan"
    ]
    path = tmp_path / "test/metrics.json"
    inode = path.stat().st_ino
    assert json.loads(path.read_text()) == {"a": 1e-45, "b": 1 / 3, "c": None, "d": None}
    assert path.read_text().index('"a"') == 4
    with path.open() as reader:  # someone reads while it is written
        run.finish(spec(), {"a": 2.0})
        assert "1e-45" in reader.read()
    assert path.stat().st_ino != inode
    assert [file.name for file in path.parent.glob("*metrics*")] == ["metrics.json"]


def test_a_run_that_cannot_be_run_leaves_nothing_behind(spec: Make, tmp_path: Path):
    new = make_spec(tmp_path / "new/runs/test")
    run.begin(new, [])
    run.abandon(new.run_dir)
    assert not (tmp_path / "new").exists()
    run.begin(new, [])
    save(new.run_dir / "checkpoints/last.ckpt", 1)
    run.abandon(new.run_dir)
    run.abandon(new.run_dir)
    assert (new.run_dir / "checkpoints/last.ckpt").exists()


def test_the_run_of_another_process_is_never_abandoned(spec: Make, tmp_path: Path, monkeypatch):
    acquire = lock.acquire

    def lock_late(run_dir: Path) -> None:
        """Another process was faster, and has ended."""
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text("seed: 0")
        acquire(run_dir)

    monkeypatch.setattr(lock, "acquire", lock_late)
    run.begin(spec(), [])
    run.abandon(tmp_path / "test")
    assert contents(tmp_path / "test")["config.yaml"] == b"seed: 0"


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was(spec: Make, tmp_path: Path):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    run.finish(spec(), {"a": 1.0})
    before = contents(tmp_path / "test")
    changed = spec({"seed": 7, "trainer.max_epochs": 4}, allow_changes=["seed"])
    run.begin(changed, [])
    assert contents(tmp_path / "test") != before
    run.abandon(changed.run_dir)
    assert contents(tmp_path / "test") == before
    run.begin(changed, [])
    save(tmp_path / "test/checkpoints/last.ckpt", 2)
    run.abandon(changed.run_dir)  # too late: it has trained with the new configuration
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text())["seed"] == 7


def test_a_run_in_the_directory_of_another_is_told_its_name(spec: Make, tmp_path: Path):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    shutil.copytree(tmp_path / "test", tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"belongs to the run test, .* run is copy.*=test"):
        run.begin(make_spec(tmp_path / "copy"), [])
    # The same run, moved on purpose.
    started = run.begin(make_spec(tmp_path / "copy", run_id="test"), [])
    assert started.ckpt_path == f"{tmp_path}/copy/checkpoints/last.ckpt"


def test_a_configuration_that_was_changed_on_purpose_keeps_its_checkpoints(
    spec: Make, tmp_path: Path
):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    changed = {"model.lr": 0.5}
    run.begin(spec(changed, allow_changes=["model.lr"]), [])
    assert run.begin(spec(changed), []).ckpt_path
    (tmp_path / "test/config.yaml").unlink()
    assert run.begin(spec(), []).ckpt_path


def test_notes_and_tags_are_kept_and_are_no_change(spec: Make, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    noted = {"notes": "mine, with s3cr3t-value", "tags": ("a", "b")}
    run.begin(spec({"notes": "mine", "tags": ["a", "b"]}, **noted), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    run.begin(spec({"notes": None, "tags": []}), [])  # no ConfigError
    known = record.read(tmp_path / "test")
    assert (known.notes, known.tags) == ("mine, with ***", ["a", "b"])
    run.begin(spec({"notes": "other", "tags": ["c"]}, notes="other", tags=["c"]), [])
    known = record.read(tmp_path / "test")
    assert (known.notes, known.tags) == ("other", ["c"])


def test_a_best_checkpoint_that_is_missing_is_said(spec: Make, tmp_path: Path):
    run_dir = tmp_path / "test"
    run.begin(spec(), [])
    assert run.best_checkpoint(run_dir) is None  # nothing was saved
    folder = run_dir / "checkpoints"
    for step in (None, 40):
        save(folder / "last.ckpt", 60, best_step=step)
        if step is None:
            assert run.best_checkpoint(run_dir) is None  # no epoch had a score
    with pytest.raises(CheckpointError, match=r"missing, .* the best checkpoint is from step 40"):
        run.best_checkpoint(run_dir)
    save(folder / "best.ckpt", 40)
    assert run.best_checkpoint(run_dir) == str(folder / "best.ckpt")


def damage(path: Path, how: str) -> None:
    """What may happen to a file that nobody looks at."""
    content = path.read_bytes()
    path.unlink()
    match how:
        case "folder":
            (path / "within").mkdir(parents=True)
        case "null":
            path.write_text("null")
        case "fifo":  # a reader would wait for ever
            os.mkfifo(path)
        case "empty":
            path.touch()
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "flipped":
            path.write_bytes(bytes([content[0] ^ 128]) + content[1:])


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("metrics.csv", "flipped"), ("metrics.csv", "cut"), ("metrics.json", "empty"),
        ("metrics.json", "folder"), ("run.json", "null"), ("run.json", "fifo"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_said_and_kept_aside(
    spec: Make, tmp_path: Path, name: str, how: str, caplog
):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    (tmp_path / "test/metrics.csv").write_text("epoch,step,train/loss\n0,19,0.25\n1,39,0.125\n")
    run.finish(spec(), {"a": 1.0, "b": 2.0})
    path = tmp_path / "test" / name
    damage(path, how)
    longer = spec({"trainer.max_epochs": 4})  # a finished run would not be looked at
    started = run.begin(longer, [])
    assert started == (False, f"{tmp_path}/test/checkpoints/last.ckpt")
    if not (name == "metrics.csv" and how == "cut"):  # a shorter number is a number too
        assert f"{path} cannot be read" in caplog.text
        assert path.with_name(f"{path.name}.damaged").exists()
    run.finish(longer, {"a": 1.0})
    assert run.begin(longer, []).finished


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_one_message_for_an_older_run_too(spec: Make, tmp_path: Path):
    run.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    before = contents(tmp_path / "test")
    for name in ("config.yaml", "run.json"):
        (tmp_path / f"test/.{name}.partial").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device"):
        run.begin(spec(), [])
    assert contents(tmp_path / "test").items() >= before.items()


def test_a_disk_that_is_full_later_is_one_message_too():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "predictions/grid.png")
    with (
        pytest.raises(WriteError, match=r"^predictions/grid.png cannot be written: No space"),
        run.full_disk_is_one_message(Path("runs/mine")),
    ):
        raise error
    with pytest.raises(FileNotFoundError), run.full_disk_is_one_message(Path("runs/mine")):
        Path("nowhere").read_text()


def test_a_place_where_nobody_may_write_is_named():
    with pytest.raises(ConfigError, match=r"run_dir=/proc/runs/test cannot be written"):
        run.begin(make_spec(Path("/proc/runs/test")), [])
