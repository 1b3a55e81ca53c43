import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from project.checkpoint import AtomicCheckpointIO
from tests.conftest import environment


def test_a_checkpoint_is_written_and_replaced(tmp_path: Path):
    path = tmp_path / "new" / "last.ckpt"
    for number in (1, 2):
        AtomicCheckpointIO().save_checkpoint({"number": torch.tensor(number)}, path)
        assert torch.load(path, weights_only=True)["number"] == number
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"number": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"number": lambda: 2}, path)
    assert torch.load(path, weights_only=True) == {"number": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_process_killed_while_it_saves_leaves_the_previous_checkpoint(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"number": 1}, path)
    program = (
        "import os, signal\n"
        "from project.checkpoint import AtomicCheckpointIO\n"
        "os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"AtomicCheckpointIO().save_checkpoint({{'number': 2}}, {str(path)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True) == {"number": 1}
    assert (tmp_path / ".last.ckpt.partial").stat().st_size > 0
    AtomicCheckpointIO().save_checkpoint({"number": 3}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
