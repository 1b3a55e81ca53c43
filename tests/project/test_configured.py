"""The configured model and data, whatever they are: a step, a checkpoint, and a run that resumes.

It stays when you replace the example by your own code.
"""

from pathlib import Path

import pytest
import torch

from tests.conftest import run

LIMITS = [f"trainer.limit_{stage}_batches=1" for stage in ("train", "val", "test")]
ONE_BATCH = ["trainer.accelerator=cpu", "report=false", *LIMITS]


@pytest.mark.program
def test_the_configured_model_takes_a_step_and_resumes(tmp_path: Path):
    command = ["train.py", *ONE_BATCH, f"run_root={tmp_path}"]
    for num_epochs in (1, 2):
        done = run(*command, f"trainer.max_epochs={num_epochs}", RUN_ID="mine")
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Continuing")
    state = torch.load(tmp_path / "mine/checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 2
