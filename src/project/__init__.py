"""Yours: models and data, and the page of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Imported first: the function below takes the name of this module.
from project.train import train as train_config


def train(overrides: Sequence[str] = ()) -> dict[str, float]:
    """Train a run in this process, such as a notebook, as ``python train.py OVERRIDES`` does.

    ``overrides`` are such as ``["trainer.max_epochs=2"]``. Returns the final metrics, also of a run
    that was finished before, and raises what ``project.train.train`` raises.
    """
    from samestep.hydra.main import train_in_process

    return train_in_process(train_config, overrides)


def load_run(run_dir: str | Path, ckpt: str = "best", *, trust: bool = False) -> tuple[Any, Any]:
    """Rebuild the model and the data of a run from its directory alone.

    Args:
        run_dir: directory of the run, such as ``"runs/mine"``.
        ckpt: ``"best"`` by the monitored metric, or ``"last"``.
        trust: call whatever the configuration of the run names, and download what it names. By
            default only what ``samestep.hydra.targets`` lists is called, and nothing is downloaded.

    Returns:
        The model, in evaluation mode and on the CPU, and its DataModule, not yet set up.

    Raises:
        ConfigError, CheckpointError: see ``samestep.hydra.saved_run``.
    """
    from samestep.hydra import saved_run  # imports torch, which takes seconds

    return saved_run.load_run(Path(run_dir), ckpt, __name__, trust=trust)
