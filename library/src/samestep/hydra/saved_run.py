"""Rebuilds the model and the data of a run from its directory, to evaluate or predict."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from omegaconf import DictConfig, OmegaConf

from samestep.callbacks.rng import SeedSteps
from samestep.callbacks.stand_ins import StandIns
from samestep.errors import ConfigError
from samestep.fit_checks import set_precision
from samestep.hydra.build import build
from samestep.hydra.nodes import escape
from samestep.hydra.targets import check_targets
from samestep.ranks.compat import name_arguments_of_loaders
from samestep.run import checkpoint, lifecycle, weights
from samestep.run.changes import read_config
from samestep.run.checkpoint import CheckpointError
from samestep.run.logs import mute_lightning
from samestep.tracker import NullLogger


def load_run(
    run_dir: Path, ckpt: str, packages: Sequence[str], *, trust: bool = False
) -> tuple[Any, Any]:
    """Rebuild the model and the data of a run from its directory alone.

    Args:
        run_dir: directory of the run.
        ckpt: ``best``, ``last``, or a checkpoint that was kept, such as ``epoch-0002``.
        packages: the user's packages, whose code may be called, like that of torch.
        trust: call whatever the configuration of the run names, and download what it names.

    Returns:
        The model, in evaluation mode and on the CPU, and its DataModule, not yet set up, or None.
    """
    cfg = read_saved_config(run_dir)
    model_cfg, data_cfg = group_of(cfg, "model"), group_of(cfg, "data")
    path = _find_checkpoint(run_dir, ckpt)
    # Before anything is called that the configuration names: this may not be a run at all.
    state = checkpoint.load(path)
    if not trust:
        check_targets(data_cfg, "data", "LightningDataModule", packages)
        check_targets(model_cfg, "model", "LightningModule", packages)
    # With data=null the model has the loaders.
    with isolate_rng():
        # A module that saves its adapters only begins with the other weights of the run again.
        L.seed_everything(cfg.seed, verbose=False)
        model: Any = build(model_cfg, "model")
        data: Any = build(data_cfg, "data") if data_cfg else None
    set_precision(model, group_of(cfg, "trainer").precision)
    if not trust and hasattr(data, "download"):
        # The run names the URL, the files and the folder, so it could write anything anywhere.
        data.download = False
    try:
        weights.load_into(model, StandIns(model).put_back(state))
        # Lightning saves the state of a DataModule under the name of its class, if it has any.
        data_state = state.get(type(data).__qualname__)
        if data_state:
            data.load_state_dict(data_state)
    # The two methods may be the user's, and fail in their own ways.
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} does not fit the model in {run_dir}/config.yaml: {reason}; restore the "
            "checkpoint of this run, or use the other one with --ckpt"
        ) from error
    return model.eval(), data


def _find_checkpoint(run_dir: Path, ckpt: str) -> Path:
    checkpoints = run_dir / "checkpoints"
    path = checkpoints / f"{ckpt}.ckpt"
    if not path.exists():
        names = [file.stem for file in sorted(checkpoints.glob("*.ckpt"))]
        raise ConfigError(f"ckpt={ckpt}: {checkpoints} holds {', '.join(names) or 'no checkpoint'}")
    if ckpt == "best":
        # Raises if best.ckpt is not the best one, which only the newest checkpoint tells.
        lifecycle.find_best(run_dir)
    return path


def evaluate(
    model: Any, data: Any, run_dir: Path, split: str, accelerator: str
) -> dict[str, float]:
    """The metrics of one split, computed in one process over all its samples.

    They equal those of the run bit for bit, if the run had one process on the same machine and kind
    of device and used all samples. The model's random numbers are those of the run.

    Args:
        model: of ``load_run``.
        data: of ``load_run``.
        run_dir: directory of the run.
        split: ``test`` or ``val``.
        accelerator: ``auto``, ``cpu`` or ``gpu``.
    """
    trainer = make_trainer(run_dir, accelerator)
    loop = trainer.test if split == "test" else trainer.validate
    try:
        loop(model, datamodule=data, verbose=False)
    except MisconfigurationException as error:
        raise ConfigError(f"--split {split}: {error}") from error
    # Not what the loop returns: that is a list with the metrics of each loader.
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def predict(model: Any, data: Any, run_dir: Path, accelerator: str) -> list[Any]:
    """The results of ``predict_step`` for all batches of ``predict_dataloader``, in one process."""
    owner = model if data is None else data
    if not is_overridden("predict_dataloader", owner):
        raise ConfigError(
            f"{run_dir}: {type(owner).__name__} has no predict_dataloader; write one, which "
            "reads the files in self.predict_files, and a predict_step of the model"
        )
    name_arguments_of_loaders()
    trainer = make_trainer(run_dir, accelerator)
    # None if there is no batch.
    found: Any = trainer.predict(model, datamodule=data) or []
    # With several loaders Lightning returns one list for each of them. The results themselves do
    # not tell: a predict_step may also return a list.
    if trainer.predict_loop.num_dataloaders > 1:
        return list(chain(*found))
    return list(found)


def make_trainer(run_dir: Path, accelerator: str) -> L.Trainer:
    """A Trainer for one process that writes nothing, in the precision of the run."""
    mute_lightning()
    cfg = read_saved_config(run_dir)
    trainer = group_of(cfg, "trainer")
    try:
        return L.Trainer(
            accelerator=accelerator,
            devices=1,
            precision=trainer.precision,
            # On a GPU other kernels would round in another way.
            deterministic=trainer.get("deterministic"),
            benchmark=trainer.get("benchmark"),
            callbacks=[SeedSteps(cfg.seed)],
            logger=NullLogger(run_dir),
            default_root_dir=run_dir,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except MisconfigurationException as error:
        raise ConfigError(f"--accelerator {accelerator}: {error}") from error


def read_saved_config(run_dir: Path) -> DictConfig:
    """The configuration of a run. Its strings are not interpolated again."""
    cfg = OmegaConf.create(escape(read_config(run_dir)))
    assert isinstance(cfg, DictConfig)
    return cfg


def group_of(cfg: DictConfig, key: str) -> DictConfig:
    """One group of a saved configuration, such as ``data``."""
    group = cfg.get(key)
    if not isinstance(group, DictConfig):
        raise ConfigError(f"config.yaml is damaged: {key} must be a group of keys")
    return group
