"""A run without what macOS and Windows do not have: on Linux, with the names taken away.

``macos/sitecustomize.py`` takes them away in the program and in its loader processes, which are
spawned there. ``python -m library.tests.test_macos RUN_DIR`` is the program; ``AT`` is an optimizer
step, ``HOW`` the signal that its whole process group gets in it, and ``WORKERS`` the number of its
loader processes.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import default_collate

from library.tests.kit import Normalized, batches, check_same
from library.tests.programs import PATIENCE_S, ROOT, environment, run_code
from samestep import BatchLoader, Trainer
from samestep.ranks import environment as ranks_environment
from samestep.ranks import output
from samestep.run import manifest
from samestep.run.metrics import read_history

FOLDER = Path(__file__).parent / "macos"
OPTIONS: dict[str, Any] = {
    "allow": ["batch_norm"],  # its batches are cut
    "accelerator": "cpu", "accumulate_grad_batches": 2, "enable_model_summary": False,
    "enable_progress_bar": False, "log_every_n_steps": 1, "max_epochs": 2,
}  # fmt: skip


class Signalled(Normalized):
    def training_step(self, batch, batch_idx):
        if self.global_step == int(os.environ.get("AT", -1)):
            os.killpg(0, signal.Signals[os.environ["HOW"]])
        return super().training_step(batch, batch_idx)


def loader(num_workers: int) -> BatchLoader:
    """Four steps an epoch, of two batches each."""
    options = {"num_workers": num_workers, "collate_fn": default_collate}
    return batches(accumulate_grad_batches=2, **options)


def train(run_dir: Path, exit_code: int, **variables: str) -> str:
    """Be a program of its own, and return what it has printed."""
    variables["PYTHONPATH"] = f"{FOLDER}:{ROOT}" if sys.platform == "linux" else str(ROOT)
    done = subprocess.run(
        # With an option, so that the fork server does not run it: it needs an import system.
        [sys.executable, "-B", "-m", "library.tests.test_macos", str(run_dir)],
        cwd=ROOT, env=environment(**variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, start_new_session=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == exit_code, done.stdout
    for word in ("Traceback", "Note: ", "exited unexpectedly"):
        assert word not in done.stdout
    return done.stdout


@pytest.mark.program
def test_a_run_on_macos_is_stopped_killed_and_continued(tmp_path: Path):
    run_dir = tmp_path / "mine"
    train(run_dir, -signal.SIGKILL, AT="6", HOW="SIGKILL")
    # It continues from the end of the first epoch, with a loader process that the signal reaches.
    printed = train(run_dir, 143, AT="6", HOW="SIGTERM", WORKERS="1")
    assert "Continuing: " in printed
    assert "Stopped by SIGTERM after step 7; saved." in printed
    assert "Continuing: " in train(run_dir, 0)
    whole = tmp_path / "whole"
    undisturbed = run_code("from library.tests.test_macos import main\nmain()", str(whole))
    assert undisturbed.returncode == 0, undisturbed.stderr
    check_same(run_dir, whole)
    log = (run_dir / "logs/rank-0.log").read_text()
    assert log.count("that needs Linux") == 3
    (memory, *_) = (row["system/memory_gib"] for row in read_history(run_dir) if "lr" in row)
    assert 0.05 < memory < 100


def test_what_macos_lacks_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What such a short run may do without: a closed terminal, and a checkpoint of megabytes."""
    for module, name in (select, "poll"), (os, "sched_getaffinity"), (os, "posix_fadvise"):
        monkeypatch.delattr(module, name, raising=False)
    reader, writer = os.pipe()
    os.close(reader)
    assert not output.has_hung_up(writer)
    os.close(writer)
    assert ranks_environment.cpus_per_rank() >= 1
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 4)
    with (tmp_path / "file").open("wb") as file:
        manifest.HashedFile(file).write(b"12345678")
    assert (tmp_path / "file").read_bytes() == b"12345678"


@pytest.mark.program
def test_windows_is_one_clear_line():
    code = 'import sys; sys.platform, sys.modules["fcntl"] = "win32", None\nimport samestep'
    done = run_code(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: samestep: sys.platform=win32: is not supported, because a run needs the file "
        "locks and signals of POSIX; use Linux or macOS, and on Windows WSL2"
    )


def main() -> None:
    trainer = Trainer(run_dir=sys.argv[1], num_sanity_val_steps=0, logger=False, **OPTIONS)
    train_loader = loader(int(os.environ.get("WORKERS", 0)))
    trainer.fit(Signalled(), train_loader, batches(shuffle=False))


if __name__ == "__main__":
    main()
