import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from library.tests.kit import Scores, fit
from library.tests.programs import PATIENCE_S
from library.tests.run.settings import make_spec, save
from samestep.callbacks.checkpoints import progress_of
from samestep.errors import ConfigError, RunError
from samestep.ranks.stopping import Interrupted, Stopped
from samestep.report import page
from samestep.run import lifecycle, lock, record
from samestep.run.checkpoint import CheckpointError
from samestep.run.files import WriteError
from samestep.run_spec import RunSpec

Make = Callable[..., RunSpec]
BEGINS = lifecycle.Start(finished=False, ckpt_path=None)


@pytest.fixture
def spec(tmp_path: Path) -> Make:
    """Makes the run ``test`` with other values of some keys."""
    return lambda changes=None, **facts: make_spec(tmp_path / "test", changes, **facts)


def contents(run_dir: Path) -> dict[str, bytes]:
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != lock.FILE]
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in files}


def test_each_start_is_recorded(spec: Make, tmp_path: Path):
    for word in ("seed=0", "logger.api_key=abc"):
        lifecycle.begin(spec(), ["train.py", word])
    known = record.read(tmp_path / "test")
    assert [start["command"] for start in known.starts] == [
        ["train.py", "seed=0"], ["train.py", "logger.api_key=***"],
    ]  # fmt: skip
    assert known.run_id == "test"
    assert known.limits == {"max_epochs": 2, "max_steps": None, "max_time": None}
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text()) == spec().config


def test_name_is_reusable_before_first_checkpoint_or_result(spec: Make):
    lifecycle.begin(spec(), [])
    assert lifecycle.begin(spec({"seed": 7}), []) == BEGINS
    lifecycle.finish(spec({"seed": 7}), {"a": 1.0})
    with pytest.raises(ConfigError, match="seed: 7 -> 0"):
        lifecycle.begin(spec(), [])


def test_another_process_may_be_faster(spec: Make, tmp_path: Path, monkeypatch):
    acquire = lock.acquire

    def lock_late(run_dir: Path) -> None:
        """Another process has begun and finished a run of the same name."""
        monkeypatch.setattr(lock, "acquire", acquire)
        other = spec({"seed": 7})
        lifecycle.begin(other, [])
        save(run_dir / "checkpoints/last.ckpt", 1)
        lifecycle.finish(other, {"a": 1.0})
        acquire(run_dir)

    monkeypatch.setattr(lock, "acquire", lock_late)
    with pytest.raises(ConfigError, match="seed: 7 -> 0"):
        lifecycle.begin(spec(), [])
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
        lifecycle.begin(spec(limits={key: before}), [])
        lifecycle.finish(spec(limits={key: before}), {})
        assert lifecycle.begin(spec(limits={key: now}), []).finished is is_finished, (
            key,
            before,
            now,
        )
        shutil.rmtree(tmp_path / "test")
        lock.forget(tmp_path / "test")


def test_a_run_is_not_finished_until_it_has_new_results(spec: Make, tmp_path: Path):
    short, long = spec(limits={"max_epochs": 2}), spec(limits={"max_epochs": 4})
    lifecycle.begin(short, [])
    lifecycle.finish(short, {"a": 1.0})
    for _ in range(2):  # it is killed on its way to new results
        assert not lifecycle.begin(long, []).finished
        assert json.loads((tmp_path / "test/metrics.json").read_text()) == {"a": 1.0}
    lifecycle.finish(long, {"a": 2.0})
    assert json.loads((tmp_path / "test/metrics.json").read_text()) == {"a": 2.0}
    assert lifecycle.begin(short, []).finished
    assert lifecycle.begin(long, []).finished


def test_a_finished_run_may_be_where_nobody_can_write(spec: Make, monkeypatch):
    lifecycle.begin(spec(), [])
    lifecycle.finish(spec(), {})

    def refuse(run_dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run_dir))

    monkeypatch.setattr(lock, "acquire", refuse)
    assert lifecycle.begin(spec(), []).finished


def test_a_run_that_begins_again_has_no_rows_of_before(spec: Make, tmp_path: Path):
    lifecycle.begin(spec(), [])
    (tmp_path / "test/metrics.csv").write_text("epoch,step\n")
    last = tmp_path / "test/checkpoints/last.ckpt"
    save(last, 1)
    record.update(tmp_path / "test", record.RUNNING, step=1, best=0.5, monitor="a")
    assert lifecycle.begin(spec(), []).ckpt_path == str(last)
    assert (tmp_path / "test/metrics.csv").exists()
    assert record.read(tmp_path / "test").best == 0.5
    last.unlink()
    assert lifecycle.begin(spec(), []).ckpt_path is None
    assert not (tmp_path / "test/metrics.csv").exists()
    known = record.read(tmp_path / "test")
    assert (known.monitor, known.best, known.step) == ("", None, None)


def test_only_its_own_results_finish_a_run(spec: Make, tmp_path: Path, caplog):
    lifecycle.begin(spec(), [])
    path = tmp_path / "test/metrics.json"
    path.write_text('{"test/accuracy": 0.99}')  # of another run
    assert not lifecycle.begin(spec(), []).finished
    lifecycle.finish(spec(), {"a": 1.0})
    path.write_text("{}")
    assert not lifecycle.begin(spec(), []).finished
    assert "metrics.json cannot be read (it was not written by this run)" in caplog.text


def test_metrics_are_exact_sorted_and_replaced_whole(spec: Make, tmp_path: Path, caplog):
    lifecycle.begin(spec(), [])
    lifecycle.finish(spec(), {"b": 1 / 3, "a": 1e-45, "c": float("nan"), "d": None})
    assert caplog.messages == [
        "c, d: not a number, and null in metrics.json; check the data for nan"
    ]
    path = tmp_path / "test/metrics.json"
    inode = path.stat().st_ino
    assert json.loads(path.read_text()) == {"a": 1e-45, "b": 1 / 3, "c": None, "d": None}
    assert path.read_text().index('"a"') == 4
    with path.open() as reader:  # someone reads while it is written
        lifecycle.finish(spec(), {"a": 2.0})
        assert "1e-45" in reader.read()
    assert path.stat().st_ino != inode
    assert [file.name for file in path.parent.glob("*metrics*")] == ["metrics.json"]


def test_a_run_that_cannot_be_run_leaves_nothing_behind(spec: Make, tmp_path: Path):
    new = make_spec(tmp_path / "new/runs/test")
    lifecycle.begin(new, [])
    lifecycle.roll_back(new.run_dir)
    assert not (tmp_path / "new").exists()
    lifecycle.begin(new, [])
    save(new.run_dir / "checkpoints/last.ckpt", 1)
    lifecycle.roll_back(new.run_dir)
    lifecycle.roll_back(new.run_dir)
    assert (new.run_dir / "checkpoints/last.ckpt").exists()


def test_the_run_of_another_process_is_never_abandoned(spec: Make, tmp_path: Path, monkeypatch):
    acquire = lock.acquire

    def lock_late(run_dir: Path) -> None:
        """Another process was faster, and has ended."""
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text("seed: 0")
        acquire(run_dir)

    monkeypatch.setattr(lock, "acquire", lock_late)
    lifecycle.begin(spec(), [])
    lifecycle.roll_back(tmp_path / "test")
    assert contents(tmp_path / "test")["config.yaml"] == b"seed: 0"


def test_a_change_that_cannot_be_made_leaves_the_run_as_it_was(spec: Make, tmp_path: Path):
    lifecycle.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    lifecycle.finish(spec(), {"a": 1.0})
    before = contents(tmp_path / "test")
    changed = spec({"seed": 7, "trainer.max_epochs": 4}, allow_changes=["seed"])
    lifecycle.begin(changed, [])
    assert contents(tmp_path / "test") != before
    lifecycle.roll_back(changed.run_dir)
    assert contents(tmp_path / "test") == before
    lifecycle.begin(changed, [])
    save(tmp_path / "test/checkpoints/last.ckpt", 2)
    lifecycle.roll_back(changed.run_dir)  # too late: it has trained with the new configuration
    assert yaml.safe_load((tmp_path / "test/config.yaml").read_text())["seed"] == 7


def test_a_run_in_the_directory_of_another_is_told_its_name(spec: Make, tmp_path: Path):
    lifecycle.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    shutil.copytree(tmp_path / "test", tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"belongs to the run test, .* run is copy.*=test"):
        lifecycle.begin(make_spec(tmp_path / "copy"), [])
    # The same run, moved on purpose.
    started = lifecycle.begin(make_spec(tmp_path / "copy", run_id="test"), [])
    assert started.ckpt_path == f"{tmp_path}/copy/checkpoints/last.ckpt"


def test_a_configuration_that_was_changed_on_purpose_keeps_its_checkpoints(
    spec: Make, tmp_path: Path
):
    lifecycle.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    changed = {"model.lr": 0.5}
    lifecycle.begin(spec(changed, allow_changes=["model.lr"]), [])
    assert lifecycle.begin(spec(changed), []).ckpt_path
    (tmp_path / "test/config.yaml").unlink()
    assert lifecycle.begin(spec(), []).ckpt_path


def test_notes_and_tags_are_kept_and_are_no_change(spec: Make, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")
    lifecycle.begin(spec({"notes": "mine, with s3cr3t-value", "tags": ["a", "b"]}), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    lifecycle.begin(spec({"notes": None, "tags": []}), [])  # no ConfigError
    known = record.read(tmp_path / "test")
    assert (known.notes, known.tags) == ("mine, with ***", ["a", "b"])
    lifecycle.begin(spec({"notes": "other", "tags": ["c"]}), [])
    known = record.read(tmp_path / "test")
    assert (known.notes, known.tags) == ("other", ["c"])


def test_a_best_checkpoint_that_is_missing_is_said(spec: Make, tmp_path: Path):
    run_dir = tmp_path / "test"
    lifecycle.begin(spec(), [])
    assert lifecycle.find_best(run_dir) is None  # nothing was saved
    folder = run_dir / "checkpoints"
    for step in (None, 40):
        save(folder / "last.ckpt", 60, best_step=step)
        if step is None:
            assert lifecycle.find_best(run_dir) is None  # no epoch had a score
    with pytest.raises(CheckpointError, match=r"missing, .* the best checkpoint is from step 40"):
        lifecycle.find_best(run_dir)
    save(folder / "best.ckpt", 40)
    assert lifecycle.find_best(run_dir) == str(folder / "best.ckpt")


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
    lifecycle.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    (tmp_path / "test/metrics.csv").write_text("epoch,step,train/loss\n0,19,0.25\n1,39,0.125\n")
    lifecycle.finish(spec(), {"a": 1.0, "b": 2.0})
    path = tmp_path / "test" / name
    damage(path, how)
    longer = spec({"trainer.max_epochs": 4})  # a finished run would not be looked at
    started = lifecycle.begin(longer, [])
    assert started == (False, f"{tmp_path}/test/checkpoints/last.ckpt")
    if not (name == "metrics.csv" and how == "cut"):  # a shorter number is a number too
        assert f"{path} cannot be read" in caplog.text
        assert path.with_name(f"{path.name}.damaged").exists()
    lifecycle.finish(longer, {"a": 1.0})
    assert lifecycle.begin(longer, []).finished


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_one_message_for_an_older_run_too(spec: Make, tmp_path: Path):
    lifecycle.begin(spec(), [])
    save(tmp_path / "test/checkpoints/last.ckpt", 1)
    before = contents(tmp_path / "test")
    for name in ("config.yaml", "run.json"):
        (tmp_path / f"test/.{name}.partial").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device"):
        lifecycle.begin(spec(), [])
    assert contents(tmp_path / "test").items() >= before.items()


def test_a_disk_that_is_full_later_is_one_message_too():
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "predictions/grid.csv")
    with (
        pytest.raises(WriteError, match=r"^predictions/grid.csv cannot be written: No space"),
        lifecycle.full_disk_is_one_message(Path("runs/mine")),
    ):
        raise error
    with pytest.raises(FileNotFoundError), lifecycle.full_disk_is_one_message(Path("runs/mine")):
        Path("nowhere").read_text()


def test_a_place_where_nobody_may_write_is_named():
    with pytest.raises(ConfigError, match=r"run_dir=/proc/runs/test cannot be written"):
        lifecycle.begin(make_spec(Path("/proc/runs/test")), [])


def test_the_reason_of_an_end_is_kept(tmp_path: Path, capsys):
    options = {"max_epochs": 1, "monitor": "val/score", "mode": "max"}
    (part,) = fit(tmp_path, lambda: Scores(0.25), **options)
    reports: list[Path] = []
    how: Any = {"resume_command": lambda spec: "make train", "report": reports.append}
    ended_spec = make_spec(tmp_path, **how)
    lost = RuntimeError("gloo/pair.cc:5] Read error [::1]:5: Connection reset by peer. GLHF!")
    for error, ended, why in (
        (Stopped(signal.SIGTERM), record.STOPPED, "SIGTERM"),
        (Interrupted(), record.STOPPED, "a second Ctrl-C"),
        (RunError("the disk is gone"), record.FAILED, "the disk is gone"),
        (lost, record.FAILED, "rank 0 has lost its connection to another rank"),
        (ValueError("http://me:hunter2@host " + 600 * "y"), record.FAILED, "ValueError: http://"),
    ):
        capsys.readouterr()
        block = lifecycle.recorded(ended_spec, lambda: progress_of(part.trainer))
        with pytest.raises(type(error)), block:
            raise error
        status = record.read(tmp_path)
        assert (status.state, status.best, status.epoch, status.step) == (ended, 0.25, 1, 4)
        assert status.why.startswith(why)
        assert "hunter2" not in status.why
        assert len(status.why) <= record.MAX_WHY
        *_, end = status.ends
        assert (end["state"], end["why"], end["step"]) == (ended, status.why, 4)
        is_stopped = isinstance(error, Stopped)
        assert ("To continue: make train\n" in capsys.readouterr().out) is is_stopped
    assert reports == [tmp_path] * 4, "at a second Ctrl-C nobody waits for a report"


def test_a_stopped_run_does_not_wait_long_for_its_report(tmp_path: Path, monkeypatch, caplog):
    is_over = threading.Event()
    monkeypatch.setattr(page, "write", lambda run_dir: is_over.wait(PATIENCE_S))
    monkeypatch.setattr(lifecycle, "REPORT_S", 0)
    lifecycle.write_in_time(tmp_path, page.write_or_warn)
    is_over.set()
    (message,) = caplog.messages
    assert f"`samestep report {tmp_path}` writes it" in message
