"""Rebuild the model and the data of a run from its directory, and test it again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from samestep.callbacks.exact import SeedSteps
from samestep.callbacks.loggers import NoTracker
from samestep.errors import ConfigError
from samestep.hydra.build import build, set_precision
from samestep.hydra.nodes import escape
from samestep.hydra.targets import check_targets
from samestep.ranks.lightning_patches import name_arguments_of_loaders
from samestep.run import checkpoint, directory
from samestep.run.changes import read_config
from samestep.run.checkpoint import CheckpointError
from samestep.run.logs import mute_lightning


def load_run(
    run_dir: Path, ckpt: str, packages: Sequence[str], *, trust: bool = False
) -> tuple[Any, Any]:
    """Rebuild the model and the data of a run from its directory alone.

    Args:
        run_dir: directory of the run.
        ckpt: ``best``, ``last``, or a checkpoint that was kept, such as ``epoch-0002``.
        packages: what they define may be called, beside what torch and others define.
        trust: call whatever the configuration of the run names, and download what it names.

    Returns:
        The model, in evaluation mode and on the CPU, and its DataModule, not yet set up, or None.
    """
    cfg = read_saved_config(run_dir)
    model_cfg, data_cfg = group_of(cfg, "model"), group_of(cfg, "data")
    checkpoints = run_dir / "checkpoints"
    path = checkpoints / f"{ckpt}.ckpt"
    if not path.exists():
        names = [file.stem for file in sorted(checkpoints.glob("*.ckpt"))]
        raise ConfigError(f"ckpt={ckpt}: {checkpoints} holds {', '.join(names) or 'no checkpoint'}")

    if ckpt == "best":
        directory.best_checkpoint(run_dir)
    # A directory that is no run fails here, before anything is called that it names.
    state = checkpoint.load(path)
    if not trust:
        if data_cfg:
            check_targets(data_cfg, "data", "LightningDataModule", packages)
        check_targets(model_cfg, "model", "LightningModule", packages)
    # A run with data=null has the loaders of its model.
    data: Any = build(data_cfg, "data") if data_cfg else None
    if not trust and hasattr(data, "download"):
        # The run names the address, the files and the folder: it could write anything anywhere.
        data.download = False
    model: Any = build(model_cfg, "model")
    set_precision(model, group_of(cfg, "trainer").precision)
    try:
        model.load_state_dict(state["state_dict"])
        # Lightning saves the state of a DataModule under the name of its class, if it has one.
        if data and (data_state := state.get(type(data).__qualname__)):
            data.load_state_dict(data_state)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} does not fit the model in {run_dir}/config.yaml: {reason}; restore the "
            "checkpoint of this run, or use the other one with --ckpt"
        ) from error
    return model.eval(), data


def evaluate(
    model: Any, data: Any, run_dir: Path, split: str, accelerator: str
) -> dict[str, float]:
    """The metrics of one split, computed in one process over all its samples.

    They equal those of the run to the last bit if the run had one process too, on the same machine
    and kind of device, and left no samples out. Random numbers of the model are those of the run.

    ``split`` is test or val, ``accelerator`` auto, cpu or gpu.
    """
    trainer = make_trainer(run_dir, accelerator)
    loop = trainer.test if split == "test" else trainer.validate
    try:
        loop(model, datamodule=data, verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"--split {split}: {error}") from error
    # As in metrics.json: what the loop returns has the figures of each loader apart.
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def predict(model: Any, data: Any, run_dir: Path, accelerator: str) -> list[Any]:
    """What ``predict_step`` returns for each batch of ``predict_dataloader``, in one process."""
    owner = data or model
    if not is_overridden("predict_dataloader", owner):
        raise ConfigError(
            f"{run_dir}: {type(owner).__name__} has no predict_dataloader; write one, and a "
            "predict_step of the model, as in Lightning's documentation: docs/tasks.md"
        )
    name_arguments_of_loaders()
    found: Any = make_trainer(run_dir, accelerator).predict(model, datamodule=data)
    several = bool(found) and all(isinstance(part, list) for part in found)  # of several loaders
    return [batch for part in found for batch in part] if several else list(found or [])


def make_trainer(run_dir: Path, accelerator: str) -> L.Trainer:
    """A Trainer for one process that writes nothing, in the precision of the run."""
    mute_lightning()
    cfg = read_saved_config(run_dir)
    try:
        return L.Trainer(
            accelerator=accelerator,
            devices=1,
            precision=group_of(cfg, "trainer").precision,
            callbacks=[SeedSteps(cfg.seed)],
            logger=NoTracker(run_dir),
            default_root_dir=run_dir,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"--accelerator {accelerator}: {error}") from error


def read_saved_config(run_dir: Path) -> DictConfig:
    """The configuration of a run, with every text as it is."""
    cfg = OmegaConf.create(escape(read_config(run_dir)))
    assert isinstance(cfg, DictConfig)
    return cfg


def group_of(cfg: DictConfig, key: str) -> DictConfig:
    """One group of a saved configuration, such as ``data``."""
    group = cfg.get(key)
    if not isinstance(group, DictConfig):
        raise ConfigError(f"config.yaml is damaged: {key} must be a group of keys")
    return group
