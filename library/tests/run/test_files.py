import errno
import fcntl
import os
from pathlib import Path

import pytest

from samestep.run.files import write_text


def test_a_device_is_never_replaced_by_a_file(tmp_path: Path):
    """Root could do so: such as an --output /dev/stdout."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="is not a regular file"):
        write_text(pipe, "text")
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError):
            write_text(folder, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    (tmp_path / ".file.txt.partial").mkdir()
    with pytest.raises(IsADirectoryError, match=r"file\.txt"):
        write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_file_is_forced_through_the_cache_of_a_disk_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supported: bool
):
    """As on macOS; not on every file system there."""
    calls = []

    def control(descriptor: int, command: int) -> None:
        calls.append(command)
        if not is_supported:
            raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    write_text(tmp_path / "file", "text")
    one = [51] if is_supported else [51, "fsync"]
    assert calls == 2 * one  # the file, and its folder
