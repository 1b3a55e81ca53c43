import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.run import checkpoint
from samestep.run.checkpoint import AtomicCheckpointIO, CheckpointError, newest
from tests.conftest import environment

WEIGHTS = torch.arange(50_000.0)


def save(path: Path, number: int) -> None:
    AtomicCheckpointIO().save_checkpoint({"global_step": number, "weights": WEIGHTS}, path)


def load(path: Path | None) -> int:
    assert path is not None
    number: int = AtomicCheckpointIO().load_checkpoint(path)["global_step"]
    return number


def test_a_checkpoint_is_written_and_replaced(tmp_path: Path):
    path = tmp_path / "new" / "best.ckpt"
    for number in (1, 2):
        save(path, number)
        assert load(path) == number
    assert sorted(file.name for file in path.parent.iterdir()) == ["best.ckpt", "manifest.json"]


def test_the_one_before_the_last_is_kept(tmp_path: Path):
    for number in (1, 2, 3):
        save(tmp_path / "last.ckpt", number)
    assert (load(tmp_path / "last.ckpt"), load(tmp_path / "last-previous.ckpt")) == (3, 2)


def test_the_manifest_names_the_digest_of_each_file(tmp_path: Path):
    for number in range(6):
        save(tmp_path / "last.ckpt", number)
    save(tmp_path / "best.ckpt", 1)
    entries = json.loads((tmp_path / "manifest.json").read_text())
    assert [entry["global_step"] for entry in entries] == [3, 4, 5, 1]  # it does not grow
    sums = "".join(f"{entry['sha256']}  {entry['name']}\n" for entry in entries[-2:])
    done = subprocess.run(["sha256sum", "-c"], input=sums, cwd=tmp_path, text=True, check=False)
    assert done.returncode == 0


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path: Path):
    path = tmp_path / "best.ckpt"
    save(path, 1)
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"number": lambda: 2}, path)
    assert load(path) == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.ckpt", "manifest.json"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_valid_checkpoint_exists_at_every_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Dies before each write, flush and rename of a save, in turn, until one save gets through."""

    def dying(owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in [
        (checkpoint._Hashed, "write"), (os, "fsync"), (Path, "replace"), (Path, "open"),
    ]:  # fmt: skip
        dying(owner, name)
    left = 0
    save(tmp_path / "last.ckpt", 1)
    deaths = 0
    for moment in range(1, 1000):
        before = load(newest(tmp_path))
        child = os.fork()
        if child == 0:
            left = moment
            save(tmp_path / "last.ckpt", before + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert load(newest(tmp_path)) in {before, before + 1}, f"died at moment {moment}"
        if status == 0:
            break
        deaths += os.WTERMSIG(status) == signal.SIGKILL
    assert load(tmp_path / "last.ckpt") == before + 1
    assert deaths > 10


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_cut_checkpoint_is_skipped(tmp_path: Path, share: float, caplog):
    for number in (1, 2):
        save(tmp_path / "last.ckpt", number)
    path = tmp_path / "last.ckpt"
    os.truncate(path, int(path.stat().st_size * share))
    assert load(newest(tmp_path)) == 1
    assert f"{path}: it is damaged" in caplog.text
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


def test_every_flipped_bit_is_noticed(tmp_path: Path):
    path = tmp_path / "best.ckpt"
    save(path, 1)
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 60):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged"):
            load(path)
    path.write_bytes(whole)
    assert load(path) == 1


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path):
    assert newest(tmp_path) is None
    save(tmp_path / "best.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)best.ckpt: .*last.ckpt: .*manifest.*RUN_ID"):
        newest(tmp_path)


class Evil:
    """Pickles itself as a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("forged_manifest", [False, True])
def test_pickled_code_is_refused(tmp_path: Path, forged_manifest: bool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "best.ckpt", 1)
    path = tmp_path / "last.ckpt"
    torch.save({"global_step": 9, "code": Evil()}, path)
    if forged_manifest:
        entry = {"name": path.name, "sha256": checkpoint._digest(path), "global_step": 9}
        (tmp_path / "manifest.json").write_text(json.dumps([entry]))
    else:
        assert load(newest(tmp_path)) == 1
    with pytest.raises(CheckpointError, match="is refused"):
        load(path)
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 1 MiB; only root may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_message_and_keeps_what_was_there(small_disk: Path):
    save(small_disk / "last.ckpt", 1)
    save(small_disk / "last.ckpt", 2)
    (small_disk / "other").write_bytes(bytes(600_000 - 2**16))
    with pytest.raises(CheckpointError, match=r"No space left on device.*Make room"):
        save(small_disk / "last.ckpt", 3)
    assert load(newest(small_disk)) == 2
    assert not list(small_disk.glob(".*partial"))


def test_a_quota_is_one_message_and_keeps_what_was_there(tmp_path: Path):
    save(tmp_path / "last.ckpt", 1)
    program = (
        "import resource, signal, torch\n"
        "from samestep.run.checkpoint import AtomicCheckpointIO\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "checkpoint = {'weights': torch.zeros(50_000)}\n"
        f"AtomicCheckpointIO().save_checkpoint(checkpoint, {str(tmp_path / 'last.ckpt')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "CheckpointError" in done.stderr
    assert "File too large" in done.stderr
    assert load(newest(tmp_path)) == 1


def test_a_directory_where_nobody_may_write_is_one_message():
    with pytest.raises(CheckpointError, match=r"/proc/.* cannot be written: .*permission"):
        save(Path("/proc/self/checkpoints/last.ckpt"), 1)
