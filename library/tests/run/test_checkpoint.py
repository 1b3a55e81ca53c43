import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from library.tests.programs import run
from library.tests.run.settings import newest
from samestep.errors import ConfigError
from samestep.plugins import shards
from samestep.run import checkpoint, manifest
from samestep.run.checkpoint import AtomicCheckpointIO, CheckpointError, DryRun
from samestep.run.files import WriteError, link_file
from samestep.run.manifest import Manifest

WEIGHTS = torch.arange(50_000.0)


def save(path: Path, number: int, best: int | None = None, *, in_background: bool = False) -> None:
    content = {"global_step": number, "state_dict": {"weights": WEIGHTS}, "loops": {}}
    content |= {"callbacks": {}, "best_step": best}
    io = AtomicCheckpointIO()
    io.in_background = in_background
    io.save_checkpoint(content, path)
    io.commit()


def record(run_dir: Path, run_id: str, *configs: str) -> None:
    """What the starts of a run leave in its record."""
    starts = [{"config": config} for config in configs or ("c",)]
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_id, "starts": starts}))


def load(path: Path | None) -> int:
    assert path is not None
    number: int = AtomicCheckpointIO().load_checkpoint(path)["global_step"]
    return number


def test_a_checkpoint_is_replaced_and_the_one_before_is_kept_if_it_is_intact(tmp_path: Path):
    last, previous = (tmp_path / f"new/{name}.ckpt" for name in ("last", "last-previous"))
    for number in (1, 2, 3):
        save(last, number)
    assert (load(last), load(previous)) == (3, 2)
    os.truncate(last, 99)
    save(last, 4)
    assert (load(last), load(previous)) == (4, 2)
    assert {path.name for path in last.parent.iterdir()} == {last.name, previous.name}


def test_a_seal_is_the_comment_of_a_zip_file_that_torch_reads(tmp_path: Path):
    record(tmp_path, "mine", "c")
    path = tmp_path / "checkpoints/last.ckpt"
    save(path, 5, best=4)
    found = manifest.read(path)
    assert found
    assert found[:4] == ("mine", "c", 5, 4)
    with zipfile.ZipFile(path) as file:
        text, _, digest = file.comment.decode().rpartition(" ")
    assert json.loads(text)["global_step"] == 5
    content = path.read_bytes()
    assert digest == found.sha256 == hashlib.sha256(content[:-64]).hexdigest()
    for mmap in (False, True):
        assert torch.load(path, mmap=mmap)["state_dict"]["weights"].equal(WEIGHTS)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_valid_checkpoint_exists_at_every_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
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
        (checkpoint, "write"), (manifest.HashedFile, "write"), (manifest.HashedFile, "add"),
        (os, "fsync"), (Path, "replace"), (Path, "open"), (Path, "hardlink_to"),
    ]:  # fmt: skip
        dying(owner, name)

    def save_both(number: int) -> None:
        save(tmp_path / "last.ckpt", number, in_background=in_background)
        link_file(tmp_path / "last.ckpt", tmp_path / "best.ckpt")

    left = 0
    save_both(1)
    deaths = 0
    for moment in range(1, 1000):
        before = load(newest(tmp_path))
        child = os.fork()
        if child == 0:
            left = moment
            save_both(before + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert load(newest(tmp_path)) in {before, before + 1}, f"died at moment {moment}"
        assert load(tmp_path / "best.ckpt") <= before + 1
        if status == 0:
            break
        deaths += os.WTERMSIG(status) == signal.SIGKILL
    assert load(tmp_path / "last.ckpt") == before + 1
    assert load(tmp_path / "best.ckpt") == before + 1
    assert deaths > 10


@pytest.mark.parametrize("share", [0.0, 0.999])
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


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(tmp_path: Path):
    assert newest(tmp_path) is None
    save(tmp_path / "best.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    for path in tmp_path.glob("*.ckpt"):
        os.truncate(path, 9)
    with pytest.raises(CheckpointError, match=r"(?s)last.ckpt: .*manifest.*best.ckpt: .*RUN_ID"):
        newest(tmp_path)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_what_a_script_saves_is_never_continued_from(tmp_path: Path, is_sharded: bool, caplog):
    folder = tmp_path / "checkpoints"
    io = AtomicCheckpointIO()
    io.folder = folder

    def save_at(step: int, name: str) -> None:
        content = {"global_step": step, "state_dict": {}, "best_step": None}
        if is_sharded:
            shards.save(io, content, {"a": torch.ones(2)}, folder / name)
        else:
            io.save_checkpoint(content, folder / name)

    io.saves_for_run = True
    save_at(1, "last.ckpt")
    io.saves_for_run = False
    save_at(2, "mine.ckpt")
    assert newest(folder) == folder / "last.ckpt"
    own = manifest.newest(tmp_path)
    assert own is not None
    assert own.global_step == 1
    assert caplog.text == ""
    for name in ("last.ckpt", "best.ckpt", "epoch-0004.ckpt"):
        with pytest.raises(ConfigError, match=rf"only the run itself writes {name} there"):
            save_at(3, name)
    save_at(3, "../kept/last.ckpt")
    save_at(4, "../kept/last.ckpt")
    assert {path.name for path in (tmp_path / "kept").glob("*.ckpt")} == {"last.ckpt"}
    # Copied there by hand.
    shutil.copy(folder / "mine.ckpt", folder / "best.ckpt")
    assert newest(folder) == folder / "last.ckpt"
    assert "best.ckpt: it was not saved by the run itself" in caplog.text


def run_of(folder: Path, best: int, num_saves: int) -> None:
    """The checkpoints of a run after so many saves; the best one is a second name of one."""
    for number in range(1, num_saves + 1):
        save(folder / "last.ckpt", number, min(best, number))
        if number == best:
            link_file(folder / "last.ckpt", folder / "best.ckpt")


@pytest.mark.parametrize(
    ("best", "message"),
    [
        (1, r"last.ckpt: it is from step 1, and last-previous.ckpt is newer\nUsing last-previous"),
        (2, r"last.ckpt: it is a copy of last-previous.ckpt, and the checkpoint after that is los"),
    ],
    ids=["older than the one before", "the one before"],
)
def test_best_in_the_place_of_last_loses_no_step_without_a_word(
    tmp_path: Path, best: int, message: str, caplog
):
    run_of(tmp_path, best, num_saves=3)
    assert newest(tmp_path) == tmp_path / "last.ckpt"
    assert caplog.text == ""
    shutil.copy(tmp_path / "best.ckpt", tmp_path / "third.ckpt")
    (tmp_path / "third.ckpt").replace(tmp_path / "last.ckpt")
    assert load(newest(tmp_path)) == 2
    assert re.search(message, caplog.text)


def test_the_newest_checkpoint_counts_whatever_its_name_is(tmp_path: Path):
    """Names that were swapped lose nothing."""
    run_of(tmp_path, best=1, num_saves=3)
    (tmp_path / "last.ckpt").rename(tmp_path / "third.ckpt")
    (tmp_path / "best.ckpt").rename(tmp_path / "last.ckpt")
    (tmp_path / "third.ckpt").rename(tmp_path / "best.ckpt")
    assert newest(tmp_path) == tmp_path / "best.ckpt"
    assert load(tmp_path / "best.ckpt") == 3


def test_checkpoints_of_another_run_are_rejected(tmp_path: Path):
    for name in ("one", "other"):
        record(tmp_path / name, name)
        save(tmp_path / name / "checkpoints/last.ckpt", 1)
        assert newest(tmp_path / name / "checkpoints")
    there, here = (tmp_path / name / "checkpoints/last.ckpt" for name in ("other", "one"))
    shutil.copy(there, here)
    for function in (newest, load):
        with pytest.raises(CheckpointError, match=r"belongs to the run other.*RUN_ID=other"):
            function(here.parent if function is newest else here)


def test_a_run_of_the_same_name_with_another_configuration_is_another_run(tmp_path: Path):
    record(tmp_path, "mine", "old")
    save(tmp_path / "checkpoints/last.ckpt", 1)
    record(tmp_path, "mine", "old", "new")  # the configuration was changed on purpose
    assert load(tmp_path / "checkpoints/last.ckpt") == 1
    record(tmp_path, "mine", "new")
    with pytest.raises(CheckpointError, match="another configuration"):
        load(tmp_path / "checkpoints/last.ckpt")


def forge(content: Any, path: Path, step: int = 0) -> None:
    """Save anything with an intact manifest."""
    with path.open("w+b") as file:
        hashed = manifest.HashedFile(file)
        torch.save(content, hashed)
        hashed.add(Manifest(None, None, step, None, ""))


def test_a_proven_file_that_is_no_checkpoint_is_one_message(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    for content in ({}, torch.zeros(3), {"state_dict": {}, "callbacks": {}}):
        forge(content, path)
        with pytest.raises(CheckpointError, match=r"cannot be used: not a Samestep checkpoint"):
            load(path)


@pytest.mark.parametrize("text", [b"", b"null", b'{"run_id": 1}', b"\xff" * 99])
def test_a_file_without_a_manifest_is_no_checkpoint(tmp_path: Path, text: bytes, caplog):
    save(tmp_path / "last.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    torch.save({"state_dict": {}, "global_step": 3}, tmp_path / "last.ckpt")
    with (tmp_path / "last.ckpt").open("ab") as file:
        file.write(text and text + b" " + b"0" * 64)
    assert load(newest(tmp_path)) == 1
    assert "last.ckpt: it is damaged, or not a Samestep checkpoint" in caplog.text
    save(tmp_path / "last.ckpt", 3)
    assert load(newest(tmp_path)) == 3


class Evil:
    """Pickles itself as a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("forged_proof", [False, True])
def test_pickled_code_is_rejected(tmp_path: Path, forged_proof: bool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "best.ckpt", 1)
    path = tmp_path / "last.ckpt"
    content = {"global_step": 9, "code": Evil()}
    if forged_proof:
        forge(content, path, step=9)
    else:
        torch.save(content, path)
        assert load(newest(tmp_path)) == 1
    with pytest.raises(CheckpointError, match="cannot be used"):
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


@pytest.mark.program
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_one_message_and_keeps_what_was_there(small_disk: Path, in_background: bool):
    save(small_disk / "last.ckpt", 1)
    save(small_disk / "last.ckpt", 2)
    (small_disk / "other").write_bytes(bytes(600_000 - 2**16))
    with pytest.raises(WriteError, match=r"No space left on device.*free some space"):
        save(small_disk / "last.ckpt", 3, in_background=in_background)
    assert load(newest(small_disk)) == 2
    assert not list(small_disk.glob(".*partial"))


def test_what_could_never_be_read_again_is_not_saved(tmp_path: Path):
    last = tmp_path / "last.ckpt"
    save(last, 1)
    for value, place in (
        (lambda: 2, r"\['x'\] is a builtins.function"),
        (np.array([1, None]), r"\['mine'\]\['x'\] is a numpy.ndarray"),
        (np.zeros(2, "f4,i4"), r"\['mine'\]\['x'\] is a numpy.ndarray"),
        ([1, Path("a")], r"\['mine'\]\['x'\]\[1\] is a pathlib\S*Path"),
        (-(2**2040), r"\['x'\] is a whole number of 2041 bits"),
        ({"when": datetime.now(UTC)}, r"\['x'\]\['when'\] is a datetime.datetime"),
    ):
        callbacks = {"mine": {"x": value}}
        content = {"global_step": 2, "state_dict": {}, "loops": {}, "callbacks": callbacks}
        message = rf"read again: checkpoint\['callbacks'\].*{place}"
        with pytest.raises(CheckpointError, match=message):
            AtomicCheckpointIO().save_checkpoint(content, last)
        assert load(newest(tmp_path)) == 1
        assert list(tmp_path.iterdir()) == [last]


@pytest.mark.parametrize("code", ["?", "b", "B", "h", "i", "l", "L", "e", "f", "d", "D", "S4", "U4",
                                  "m8[s]", "M8[s]"])  # fmt: skip
def test_numbers_and_arrays_of_numpy_are_read_as_they_were(tmp_path: Path, code: str):
    array = np.arange(6).astype("i8").reshape(2, 3).astype(code)
    values = {"a": array, "s": array[1, 2], "f": np.asfortranarray(array)[:, ::2], "0": array[:0]}
    content = {"global_step": 2, "state_dict": {}, "loops": {}, "callbacks": {}}
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content | {"mine": values, array[1, 1]: 1}, path)
    read = AtomicCheckpointIO().load_checkpoint(path)
    assert read[array[1, 1]] == 1
    for name, value in values.items():
        found = read["mine"][name]
        assert type(found) is type(value)
        assert found.dtype == value.dtype
        np.testing.assert_array_equal(found, value)


class Marked(torch.Tensor):
    """As MONAI's MetaTensor: a tensor with attributes."""

    def __new__(cls, values: Any) -> "Marked":
        made = torch.as_tensor(values).as_subclass(cls)
        made.affine = torch.eye(2)  # type: ignore[attr-defined]
        return made  # type: ignore[no-any-return]


def test_subclasses_of_tensors_are_read_as_tensors(tmp_path: Path):
    marked = Marked([1.0, 2.0])
    content = {
        "global_step": 2, "state_dict": {"w": marked}, "loops": {}, "callbacks": {"a": [marked]},
        "mine": {"x": (marked, 3)},
    }  # fmt: skip
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.dry_run = DryRun()
    io.save_checkpoint(content, path)
    assert io.dry_run.problem is None
    assert io.dry_run.made_plain == ["a/0 (Marked)", "x/0 (Marked)"]
    io.dry_run = None
    io.save_checkpoint(content, path)
    read = io.load_checkpoint(path)
    for found in (read["state_dict"]["w"], read["callbacks"]["a"][0], read["mine"]["x"][0]):
        assert type(found) is torch.Tensor
        assert found.tolist() == [1.0, 2.0]
    assert content["mine"]["x"][0] is marked


@pytest.mark.program
def test_a_quota_is_one_message_and_keeps_what_was_there(tmp_path: Path):
    save(tmp_path / "last.ckpt", 1)
    program = (
        "import resource, signal, torch\n"
        "from samestep.run.checkpoint import AtomicCheckpointIO\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "checkpoint = {'state_dict': torch.zeros(50_000), 'global_step': 2}\n"
        f"AtomicCheckpointIO().save_checkpoint(checkpoint, {str(tmp_path / 'last.ckpt')!r})\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    done = run(str(script))
    assert "WriteError" in done.stderr
    assert "File too large" in done.stderr
    assert load(newest(tmp_path)) == 1


def test_a_directory_where_nobody_may_write_is_one_message():
    with pytest.raises(WriteError, match=r"/proc/.* cannot be written: .*mend that"):
        save(Path("/proc/self/checkpoints/last.ckpt"), 1)
