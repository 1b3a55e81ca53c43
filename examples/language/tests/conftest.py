"""A run of text that takes seconds."""

from pathlib import Path

import pytest

from tests.conftest import run

TEXT = [
    "experiment=language", "trainer.accelerator=cpu", "trainer.max_epochs=2",
    "trainer.limit_train_batches=15", "data.context=32", "data.global_batch_size=12",
    "model.net.width=16", "model.net.num_layers=1", "model.net.num_heads=2",
    "callbacks.samples.length=20", "report=false",
]  # fmt: skip
"""Overrides that make a run of text finish in seconds: 15 steps an epoch."""


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run that has learned a little English; what it printed is beside."""
    root = tmp_path_factory.mktemp("text")
    done = run("train.py", *TEXT, f"run_root={root}", RUN_ID="text")
    assert done.returncode == 0, done.stderr
    (root / "stdout.txt").write_text(done.stdout)
    return root / "text"
