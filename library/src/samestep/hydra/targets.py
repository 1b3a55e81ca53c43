"""Decides what the config.yaml of a run may call when its model and data are built again.

A run directory may come from another person, and its configuration names functions and their
arguments. Unless the user trusts the run, only these may be called:

- a LightningModule as the model, a LightningDataModule as the data;
- networks, optimizers, schedules and data sets of the project, and functions annotated to return
  one;
- the same from torch.nn, torch.optim, torchvision and torchmetrics, whose constructors neither
  execute nor write what their arguments name;
- each ``_target_`` of the model or the data in the project's own configs/, or in a folder that
  ``hydra.searchpath`` of train.yaml adds to it.

Nothing else is even imported. The arguments always come from the run.
"""

import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from samestep.errors import ConfigError
from samestep.hydra.build import find_targets, locate
from samestep.hydra.nodes import walk
from samestep.hydra.project import config_folders
from samestep.run_spec import select

LIBRARIES = (
    "torch.nn.", "torch.optim.", "torchvision.models.", "torchvision.transforms.",
    "torchvision.ops.", "torchmetrics.aggregation.", "torchmetrics.classification.",
    "torchmetrics.regression.",
)  # fmt: skip
# Not Dataset: torchvision's read pickles from a folder, which the run could bring with it.
KINDS = (nn.Module, Optimizer, LRScheduler)
OWN_KINDS = (*KINDS, Dataset, Sampler)


def check_targets(node: DictConfig, key: str, kind: str, packages: Sequence[str]) -> None:
    """Raise a ConfigError for the first ``_target_`` below ``node`` that must not be called.

    Args:
        node: the group of the configuration.
        key: its key, for messages.
        kind: LightningModule or LightningDataModule, which the class of the node itself must be.
        packages: the user's packages.
    """
    configured = find_configured()
    own = tuple(f"{package}." for package in packages)
    for path, target_node in find_targets(node, key):
        target = str(target_node["_target_"])
        if target not in configured and not builds_parts(target, path, own):
            raise untrusted(path, target)
        found = locate(target, path)
        if path == key and not _is_a(found, kind):
            raise ConfigError(f"{path}._target_={target}: must be a {kind}")


def builds_parts(target: str, path: str, own: tuple[str, ...]) -> bool:
    """Whether calling the target can only build a module, optimizer, schedule or data set."""
    # Importing a module runs it, so this comes before the object is looked up.
    trusted = (*own, *LIBRARIES)
    if not target.startswith(trusted):
        return False
    found = locate(target, path)
    # Where it is defined, not where it was found: project.train.sys.exit is not the project's.
    module = f"{getattr(found, '__module__', '')}."
    if not module.startswith(trusted):
        return False
    result = found if isinstance(found, type) else _annotated_result(found)
    if not isinstance(result, type):
        return False
    if module.startswith("torchvision.transforms."):
        return True
    kinds = OWN_KINDS if module.startswith(own) else KINDS
    return issubclass(result, kinds) or _is_a(result, "LightningDataModule")


def _annotated_result(function: Any) -> Any:
    """The type that a function is annotated to return; None if that is unknown."""
    try:
        return typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return None


def _is_a(found: Any, kind: str) -> bool:
    # By name: lightning and pytorch_lightning each have a class LightningModule.
    return isinstance(found, type) and any(base.__name__ == kind for base in found.__mro__)


def untrusted(path: str, target: str) -> ConfigError:
    """The error for a target that only the configuration of the run names."""
    return ConfigError(
        f"{path}._target_={target}: is not a network, optimizer, schedule or data set of the "
        "project, nor named in configs/model or configs/data, and loading would call it. If you "
        "trust whoever made this run directory, add --trust (in Python, trust=True)"
    )


def find_configured() -> set[str]:
    """Each ``_target_`` of the model or the data in the files of configs/."""
    try:
        folders = config_folders()
    except ConfigError:
        return set()  # the installed package loads a run, far from its project
    found: set[str] = set()
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            is_group = file.relative_to(folder).parts[0] in ("model", "data")
            found |= _targets_in(file, is_group=is_group)
    return found


def _targets_in(file: Path, *, is_group: bool) -> set[str]:
    """Each ``_target_`` of the model or the data in one file."""
    try:
        content = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return set()  # an editor may just be writing the file
    if not is_group:
        # An experiment, or the settings of this machine. Its loggers and callbacks are left out:
        # they may write files.
        content = [select(content, "model"), select(content, "data")]
    found = set()
    for path, value in walk(content):
        if path.rpartition(".")[2] == "_target_":
            found.add(str(value))
    return found
