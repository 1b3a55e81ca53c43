"""Saves that a thread writes: the training goes on, and nothing gets lost or into the file."""

import errno
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch

from library.tests.kit import Net, Scores, batches, check_exact, check_same, fit, on_ranks
from library.tests.plugins.test_fsdp import SHARDED, averages
from samestep.ranks import environment
from samestep.run import background, checkpoint, manifest
from samestep.run.background import MemoryFile, available_memory
from samestep.run.checkpoint import AtomicCheckpointIO, load, write_copy
from samestep.run.files import WriteError, writing

NO_ROOM = "Note: training waits while checkpoints are written: a copy takes"


class SlowDisk(L.Callback):
    """Lets nothing be written before step 8, and notes what is there meanwhile."""

    def __init__(self, last: Path) -> None:
        self.last, self.may_write = last, threading.Event()
        self.is_killed = False
        self.seen: dict[int, int | None] = {}  # the step of last.ckpt in each step

    def setup(self, *_: Any, **__: Any) -> None:
        self.is_killed = False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        step, own = trainer.global_step, manifest.read(self.last)
        self.seen[step] = own.global_step if own else None
        if step == 8:
            self.may_write.set()
            while trainer.strategy.checkpoint_io.is_writing():
                time.sleep(0.01)

    def on_exception(self, *_: Any) -> None:
        self.is_killed = not self.may_write.is_set()
        self.may_write.set()

    def write(self, *what: Any) -> None:
        self.may_write.wait()
        if not self.is_killed:
            write_copy(*what)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before training waits for it."""
    start = background.BackgroundWriter.start

    def start_late(writer: Any, write: Callable[..., None], *arguments: Any) -> Any:
        is_waited_for = threading.Event()

        def write_late(*what: Any) -> None:
            is_waited_for.wait()
            write(*what)

        def tell(wait: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: (is_waited_for.set(), wait())[1]

        written = start(writer, write_late, *arguments)
        written.result = tell(written.result)  # type: ignore[method-assign]
        written.exception = tell(written.exception)  # type: ignore[method-assign]
        return written

    monkeypatch.setattr(background.BackgroundWriter, "start", start_late)


class StopsWriting:
    """Ends the process by SIGKILL while a thread writes the checkpoint of epoch 1.

    Args:
        moment: ``half``: the file is written halfway; ``rename``: only its name is missing.
    """

    def __init__(self, moment: str) -> None:
        self.moment, self.may_kill = moment, threading.Event()
        self.num = 0
        self.write, self.fsync = manifest.HashedFile.write, os.fsync

    def stop(self) -> None:
        if threading.current_thread() is threading.main_thread():
            return
        self.num += 1
        if self.num == 2:
            self.may_kill.set()
            threading.Event().wait()

    def write_half(self, file: manifest.HashedFile, data: Any) -> None:
        self.write(file, data[: len(data) // 2])
        self.stop()
        self.write(file, data[len(data) // 2 :])

    def sync(self, descriptor: int) -> None:
        # Of the file, and of the folder.
        if Path(f"/dev/fd/{descriptor}").is_file():
            self.stop()
        self.fsync(descriptor)


class Kills(L.Callback):
    """Kills the process in the first step in which a thread hangs."""

    def __init__(self, stops: StopsWriting) -> None:
        self.stops = stops

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > 8:
            self.stops.may_kill.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def data() -> Any:
    return batches(24, 5)


def on_slow_disks(folder: str, strategy: str) -> None:
    root = Path(folder)
    common = SHARDED | {"strategy": strategy}
    options = common | {"monitor": None, "save_every_s": 1e9, "max_epochs": 3}
    slow = SlowDisk(root / "slow/checkpoints/last.ckpt")
    with mock.patch.object(checkpoint, "write_copy", slow.write):
        fit(root / "slow", Net, data, callbacks=lambda: [slow], **options)
    if environment.rank() == 0:
        assert [slow.seen[step] for step in (5, 6, 7, 8, 9)] == [None, None, None, None, 5]
    assert manifest.read(slow.last).global_step == 15

    # Killed while it writes, a run starts over; killed later, it continues from what was written.
    slow = SlowDisk(root / "kill/checkpoints/last.ckpt")
    killed = {"how": "SIGKILL", "callbacks": lambda: [slow], **options}
    with mock.patch.object(checkpoint, "write_copy", slow.write):
        parts = fit(root / "kill", Net, data, [(1, 1), (1, 4)], **killed)
    assert [part.seen[0][:2] for part in parts] == [(0, 0), (0, 0), (1, 0)]
    check_same(root / "kill", root / "slow")

    # One writes all of it, or each its part.
    fails = 0 if strategy == "ddp" else 1

    def fail(copied: Any, own: Any, target: Path) -> None:
        with writing(target):
            if environment.rank() == fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    text = {
        0: r"last\.ckpt cannot be written: No space",
        1: r"rank 1: .*1\.shard cannot be written",
    }
    with (
        mock.patch.object(checkpoint, "write_copy", fail),
        pytest.raises(WriteError, match=text[fails]),
    ):
        fit(root / "full", Net, data, **common)


def kill_while_writing(folder: str, moment: str) -> None:
    stops = StopsWriting(moment)
    manifest.HashedFile.write = lambda *both: stops.write_half(*both)  # type: ignore[method-assign]
    if moment == "rename":
        manifest.HashedFile.write = stops.write  # type: ignore[method-assign]
        background_sync = mock.patch("samestep.run.files.sync_file", stops.sync)
        background_sync.start()
    fit(Path(folder, "killed"), max_epochs=4, callbacks=lambda: [Kills(stops)])


@pytest.mark.program
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=averages)])
def test_training_goes_on_while_checkpoints_are_written(tmp_path: Path, strategy: str):
    """A save of step 5 lasts until step 8; then it holds what it should, or ends the run."""
    done = on_ranks(on_slow_disks, str(tmp_path), strategy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.program
@pytest.mark.parametrize("moment", ["half", "rename"])
def test_a_run_killed_while_it_writes_continues_from_the_save_before(tmp_path: Path, moment: str):
    done = on_ranks(kill_while_writing, str(tmp_path), moment, num=0)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    folder = tmp_path / "killed/checkpoints"
    assert {path.name for path in folder.iterdir()} == {"last.ckpt", ".last.ckpt.partial"}
    assert load(folder / "last.ckpt")["global_step"] == 4
    (part,) = fit(tmp_path / "killed", max_epochs=4)
    assert part.seen[0][:2] == (1, 0)
    fit(tmp_path / "whole", max_epochs=4)
    check_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.usefixtures("slow_disk")
def test_a_run_stopped_while_it_writes_repeats_nothing(tmp_path: Path):
    check_exact(tmp_path, Net, batches, (0, 1), (1, "start"), (1, 0), save_every_s=1e-9)


@pytest.mark.usefixtures("slow_disk")
def test_the_hooks_of_the_end_and_a_run_that_fails_have_the_best_checkpoint(tmp_path: Path):
    class Reads(L.Callback):
        def __init__(self) -> None:
            self.step = 0

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            path = trainer.checkpoint_callback.best_model_path
            self.step = load(Path(path))["global_step"]

    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                raise ValueError("planted")

    reads = Reads()
    options: dict[str, Any] = {"monitor": "val/score", "max_epochs": 2}
    fit(tmp_path / "ends", lambda: Scores(2, 1), callbacks=lambda: [reads], **options)
    with pytest.raises(ValueError, match="planted"):
        fit(tmp_path / "fails", lambda: Scores(1), callbacks=lambda: [Fails()], **options)
    assert reads.step == 8
    assert load(tmp_path / "fails/checkpoints/best.ckpt")["global_step"] == 4


def test_nothing_that_training_changes_gets_into_the_file(tmp_path: Path, monkeypatch):
    may_write = threading.Event()

    def write(*what: Any) -> None:
        may_write.wait()
        write_copy(*what)

    monkeypatch.setattr(checkpoint, "write_copy", write)
    weight = torch.nn.Parameter(torch.arange(100_000.0))
    tied = OrderedDict(a=weight, b=weight.detach()[:7])
    tied._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    rows, array = [1, {"x": [2]}], np.zeros(3)
    content = {"global_step": 1, "state_dict": tied, "rows": rows, "array": array}
    io = AtomicCheckpointIO()
    io.in_background = True
    path = tmp_path / "last.ckpt"
    # The second one is written into the memory of the first.
    for number in (1, 2):
        may_write.clear()
        io.save_checkpoint(content | {"number": number}, path)
        assert io.is_writing()
        with torch.no_grad():
            weight.add_(1)
        rows[1]["x"].append(3)  # type: ignore[index]
        array += 1
        may_write.set()
        io.commit()
        saved = load(path)
        assert saved["number"] == number
        assert saved["state_dict"]["a"].equal(torch.arange(100_000.0) + number - 1)
        assert saved["state_dict"]["b"].equal(torch.arange(7.0) + number - 1)
        assert saved["state_dict"]._metadata == {"": {"version": 1}}
        assert saved["rows"] == [1, {"x": [2, *[3] * (number - 1)]}]
        assert saved["array"].tolist() == [number - 1] * 3
    size = path.stat().st_size
    io.in_background = False
    io.save_checkpoint(content | {"number": 2}, tmp_path / "whole.ckpt")
    assert size < 500_000, "tied weights are saved once"
    assert abs(size - (tmp_path / "whole.ckpt").stat().st_size) < 100


def test_without_memory_for_a_copy_training_waits_and_says_so_once(tmp_path: Path, capsys):
    started = []

    def write(*what: Any) -> None:
        started.append(what)

    with (
        mock.patch.object(background, "available_memory", return_value=7_000_000),
        mock.patch.object(checkpoint, "write_copy", write),
    ):
        check_exact(tmp_path / "runs", Net, batches, (0, 1), (1, 1))
    assert not started
    said = capsys.readouterr().out
    assert said.count(NO_ROOM) == 4, "once in each start"
    assert f"{NO_ROOM} 0.0 GB of the 0.0 GB of free memory" in said


def test_the_memory_of_the_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    free = available_memory()
    assert free is None or free > 2**20
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:      5000 kB\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    monkeypatch.setattr(background, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(background, "GROUP", tmp_path)
    for limit, expected in (("max", 5_120_000), ("6000000", 4_000_000), ("9000000", 5_120_000)):
        (tmp_path / "memory.max").write_text(limit + "\n")
        assert available_memory() == expected
    (tmp_path / "meminfo").unlink()
    (tmp_path / "memory.max").unlink()
    assert available_memory() is None


def test_a_file_that_is_larger_than_expected_is_kept_whole():
    copied = MemoryFile()
    copied.begin(5)
    content = os.urandom(3 * 2**20)
    for start in range(0, len(content), 10_000):
        copied.write(content[start : start + 10_000])
    assert bytes(copied.view()) == content
    capacity = copied.capacity
    copied.begin(10)
    copied.write(b"new")
    assert bytes(copied.view()) == b"new"
    assert copied.capacity == capacity
