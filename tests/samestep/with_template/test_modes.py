"""Every debug mode and experiment, in whole runs within this process. Loggers: test_trackers.py."""

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from project.train import train
from samestep import load_run
from samestep.hydra.compose import check
from samestep.hydra.saved_run import evaluate
from tests.conftest import CONFIGS, NO_PICTURES, QUICK

pytestmark = pytest.mark.program


@pytest.fixture(autouse=True)
def restore_process() -> Iterator[None]:
    """A run ends with its process, elsewhere: here its log files are closed."""
    logging.disable(logging.NOTSET)  # a script that another test called here has changed it
    yield
    for handler in [h for h in logging.getLogger().handlers if h.name == "samestep.run.logs"]:
        logging.getLogger().removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(tmp_path: Path, *overrides: str) -> Path:
    """Train in this process; return the run directory."""
    quick = [*QUICK, NO_PICTURES, "model=mlp", f"run_root={tmp_path}", "run_id=run"]
    train(check([*quick, *overrides]))
    return tmp_path / "run"


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("debug", choices("debug"))
def test_every_debug_mode_runs_to_its_end(tmp_path: Path, debug: str):
    long = ["trainer.max_epochs=60", "model.optimizer.lr=0.01"] if debug == "overfit" else []
    run_dir = run(tmp_path, f"debug={debug}", *long)
    if debug == "fast":
        assert not run_dir.exists()
        return
    assert "test/accuracy" in json.loads((run_dir / "metrics.json").read_text())
    if debug == "limit":
        steps = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)["global_step"]
        assert steps == 2 * 3
    if debug == "overfit":
        assert json.loads((run_dir / "metrics.json").read_text())["train/loss"] < 0.1
    if debug == "profiler":
        assert "run_training_epoch" in (run_dir / "logs/rank-0.log").read_text()


EVERY_CHOICE = [
    *(f"experiment={name}" for name in choices("experiment") if name != "finetune"),
    "callbacks=[early_stopping,ema]",
    "trainer.precision=64-true",
]


@pytest.mark.parametrize("choice", EVERY_CHOICE)
def test_the_figures_of_a_run_are_those_of_its_best_checkpoint(tmp_path: Path, choice: str):
    run_dir = run(tmp_path, choice, "trainer.max_epochs=2", "trainer.limit_train_batches=6")
    final = json.loads((run_dir / "metrics.json").read_text())
    tested = {name: value for name, value in final.items() if name.startswith("test/")}
    assert len(tested) == 2
    model, data = load_run(run_dir)
    assert evaluate(model, data, run_dir, "test", "cpu") == tested


def test_the_moving_average_is_what_is_tested_and_saved(tmp_path: Path):
    run_dir = run(tmp_path, "callbacks=ema", "callbacks.ema.decay=0.9")
    checkpoint = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)
    averaged, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert any(not torch.equal(averaged[name], current[name]) for name in averaged)


def test_a_run_that_no_longer_improves_stops_early(tmp_path: Path):
    overrides = ["callbacks=early_stopping", "callbacks.early_stopping.patience=1"]
    run_dir = run(tmp_path, *overrides, "trainer.max_epochs=30", "model.optimizer.lr=1e-9")
    last = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)
    assert last["epoch"] < 10
    # It has epochs left, and goes on with more patience.
    longer = ["callbacks.early_stopping.patience=2", "trainer.max_epochs=30"]
    run(tmp_path, "callbacks=early_stopping", "model.optimizer.lr=1e-9", *longer)
    again = torch.load(run_dir / "checkpoints/last.ckpt", weights_only=True)
    assert again["epoch"] == last["epoch"] + 1
