"""Rebuild the model and the data of a run from its directory."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.build import build, set_precision
from samestep.hydra.schema import escape
from samestep.hydra.targets import check_targets
from samestep.run import checkpoint, directory
from samestep.run.changes import read_config
from samestep.run.checkpoint import CheckpointError


def load_run(run_dir: Path, ckpt: str, package: str, *, trust: bool = False) -> tuple[Any, Any]:
    """Rebuild the model and the data of a run from its directory alone.

    Args:
        run_dir: directory of the run.
        ckpt: ``best``, ``last``, or a checkpoint that was kept, such as ``epoch-0002``.
        package: what it defines may be called, beside what torch and others define.
        trust: call whatever the configuration of the run names, and download what it names.

    Returns:
        The model, in evaluation mode and on the CPU, and its DataModule, not yet set up, or None.

    Raises:
        ConfigError: if ``run_dir`` is not the directory of a run, has no such checkpoint, or
            names what must not be called.
        CheckpointError: if the checkpoint is damaged, or belongs to another model.
    """
    model_cfg, data_cfg = read_saved_group(run_dir, "model"), read_saved_group(run_dir, "data")
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
            check_targets(data_cfg, "data", "LightningDataModule", package)
        check_targets(model_cfg, "model", "LightningModule", package)
    # A run with data=null has the loaders of its model.
    data: Any = build(data_cfg, "data") if data_cfg else None
    if not trust and hasattr(data, "download"):
        # The run names the address, the files and the folder: it could write anything anywhere.
        data.download = False
    model: Any = build(model_cfg, "model")
    set_precision(model, read_saved_group(run_dir, "trainer").precision)
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


def move_to(accelerator: str, model: torch.nn.Module) -> None:
    """Move the model to the accelerator of this machine: cpu, gpu, or auto, which takes a GPU.

    Raises:
        ConfigError: for gpu, if this machine has none.
    """
    if accelerator == "gpu" and not torch.accelerator.is_available():
        raise ConfigError("--accelerator gpu: this machine has none; auto takes the CPU then")
    if accelerator != "cpu" and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())


def set_places(data: Any, arguments: Any) -> None:
    """Say where the data of a run are now: ``arguments`` may have root, file, mirror and download.

    Raises:
        ConfigError: if the data have no such setting, or only the run names where to download to.
    """
    given = vars(arguments)
    if given.get("download") and given.get("root") is None and not given.get("trust"):
        raise ConfigError(
            "--download: needs --data-root DIR, the folder to download to; the run directory may "
            "be somebody else's, and then its folder is too"
        )
    for name in ("root", "file", "mirror", "download"):
        value = getattr(arguments, name, None)
        if value is None:
            continue
        if not hasattr(data, name):
            option = "--download" if name == "download" else f"--data-{name}"
            raise ConfigError(f"{option}: {type(data).__name__} of this run has no such setting")
        setattr(data, name, value)


def read_saved_config(run_dir: Path) -> DictConfig:
    """The configuration of a run, with every text as it is.

    Raises:
        ConfigError: if ``run_dir`` is not the directory of a run.
    """
    cfg = OmegaConf.create(escape(read_config(run_dir)))
    assert isinstance(cfg, DictConfig)
    return cfg


def read_saved_group(run_dir: Path, key: str) -> DictConfig:
    """One group of the saved configuration, such as ``data``.

    Raises:
        ConfigError: if it is not there.
    """
    group = read_saved_config(run_dir).get(key)
    if not isinstance(group, DictConfig):
        raise ConfigError(f"{run_dir}/config.yaml is damaged: {key} must be a group of keys")
    return group
