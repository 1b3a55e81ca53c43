import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from library.tests.programs import environment
from samestep.errors import ConfigError
from samestep.run import lock


@pytest.mark.program
def test_two_processes_do_not_share_a_run_directory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lock, "TIMEOUT_S", 1)
    program = (
        "import sys, time; from pathlib import Path; from samestep.run import lock\n"
        "lock.acquire(Path(sys.argv[1])); print('claimed', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    owner = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "claimed\n"
        assert lock.is_held(tmp_path)
        with pytest.raises(ConfigError, match=f"in use by process {owner.pid} on .*another"):
            lock.acquire(tmp_path)
    finally:
        owner.kill()
        owner.communicate()
    lock.acquire(tmp_path)  # a dead owner's lock is taken over


@pytest.mark.parametrize("comes_third", [True, False])
def test_a_lock_without_a_name_is_no_lock(tmp_path: Path, monkeypatch, comes_third: bool):
    flock = lock.fcntl.flock
    run_dir = tmp_path / "mine"

    def flock_late(file: int, operation: int) -> None:
        """The owner has removed the directory meanwhile, and a third process may have begun."""
        monkeypatch.setattr(lock.fcntl, "flock", flock)
        shutil.rmtree(run_dir)
        if comes_third:
            lock.acquire(run_dir)
            lock.forget(run_dir)  # as if another process held it
        flock(file, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock_late)
    monkeypatch.setattr(lock.time, "sleep", lambda _: None)
    if comes_third:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on .* since"):
            lock.acquire(run_dir)
    else:
        lock.acquire(run_dir)
        assert lock.is_held(run_dir)


def test_a_directory_of_two_names_is_locked_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lock, "TIMEOUT_S", 1)
    (tmp_path / "link").symlink_to("mine")
    lock.acquire(tmp_path / "mine")
    lock.acquire(tmp_path / "link")
