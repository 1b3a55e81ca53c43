"""Test or validate the model of a run again."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from samestep.callbacks.exact import SeedSteps
from samestep.callbacks.loggers import NoTracker
from samestep.errors import ConfigError
from samestep.hydra.saved_run import group_of, read_saved_config
from samestep.run.logs import mute_lightning


def evaluate(
    model: Any, data: Any, run_dir: Path, split: str, accelerator: str
) -> dict[str, float]:
    """The metrics of one split, computed in one process over all its samples.

    They equal those of the run to the last bit if the run had one process too, on the same machine
    and kind of device, and left no samples out. Random numbers of the model are those of the run.

    Args:
        model: of the run, as ``load_run`` gives it.
        data: of the run.
        run_dir: directory of the run; its configuration says the precision.
        split: test or val.
        accelerator: auto, cpu or gpu.

    Raises:
        ConfigError: if this machine has no such accelerator, or the run has no such split.
    """
    mute_lightning()
    cfg = read_saved_config(run_dir)
    try:
        trainer = L.Trainer(
            accelerator=accelerator,
            devices=1,
            precision=group_of(cfg, "trainer").precision,
            callbacks=[SeedSteps(cfg.seed)],
            logger=NoTracker(run_dir),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"--accelerator {accelerator}: {error}") from error
    loop = trainer.test if split == "test" else trainer.validate
    try:
        loop(model, datamodule=data, verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"--split {split}: {error}") from error
    # As in metrics.json: what the loop returns has the figures of each loader apart.
    return {name: value.item() for name, value in trainer.callback_metrics.items()}
