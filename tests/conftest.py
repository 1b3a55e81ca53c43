"""Shared pieces: real runs of ``train.py``, small enough to take seconds."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
QUICK = ["trainer.max_epochs=2", "trainer.accelerator=cpu", "data.global_batch_size=60"]
"""Overrides that make a run of the digits finish in seconds: 20 steps an epoch."""

torch.set_num_threads(1)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a subprocess: this one, less what names a run or reaches a service."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RUN_ID", "WANDB", "MLFLOW"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"} | variables


def run(
    *command: str, cwd: Path = ROOT, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python <command>`` as a user would, and return what it said."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd, env=environment(**variables), timeout=timeout,
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run: two epochs of digits, as a user trains them."""
    root = tmp_path_factory.mktemp("runs")
    result = run("train.py", *QUICK, f"run_root={root}", RUN_ID="digits")
    assert result.returncode == 0, result.stderr
    (root / "stdout.txt").write_text(result.stdout)
    (root / "stderr.txt").write_text(result.stderr)
    return root / "digits"


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., object]:
    """Compose and check a configuration whose run lives in ``tmp_path``."""
    from samestep.config.compose import check

    def build(*overrides: str) -> object:
        return check([f"run_root={tmp_path}", "run_id=test", *QUICK, *overrides])

    return build
