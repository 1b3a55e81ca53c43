"""What the config.yaml of a run may call when its model and its data are built again.

A run directory may come from somebody else, and its configuration names functions and their
arguments. So only this is called, unless the user trusts the run:

- a LightningModule as the model, a LightningDataModule as the data;
- networks, optimizers, schedules and data sets of the project itself, and functions whose
  annotation says that they return one;
- the same from torch.nn, torch.optim, torchvision and torchmetrics, in which no constructor runs
  or writes what its arguments name;
- what the project's own files name: a ``_target_`` of the model or the data in configs/, or in a
  folder that ``hydra.searchpath`` of train.yaml adds to it.

Nothing else is even imported. The arguments are always those of the run.
"""

import typing
from collections.abc import Sequence
from contextlib import suppress
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

LIBRARIES = (
    "torch.nn.", "torch.optim.", "torchvision.models.", "torchvision.transforms.",
    "torchvision.ops.", "torchmetrics.aggregation.", "torchmetrics.classification.",
    "torchmetrics.regression.",
)  # fmt: skip
# Not Dataset: those of libraries read pickles from a folder that the run could bring with it.
KINDS = (nn.Module, Optimizer, LRScheduler)
OWN_KINDS = (*KINDS, Dataset, Sampler)


def check_targets(node: DictConfig, key: str, kind: str, packages: Sequence[str]) -> None:
    """Raise a ConfigError for the first ``_target_`` below ``node`` that must not be called.

    ``kind`` is what the node itself must be: LightningModule or LightningDataModule.
    """
    configured = find_configured()
    own = tuple(f"{package}." for package in packages)
    for path, target_node in find_targets(node, key):
        target = str(target_node["_target_"])
        is_named = target in configured
        # Importing a module runs it, so this comes before the object is looked up.
        if not is_named and not target.startswith((*own, *LIBRARIES)):
            raise untrusted(path, target)
        found = locate(target, path)
        if not is_named and not builds_parts(found, own):
            raise untrusted(path, target)
        # By name: lightning and pytorch_lightning each have types of their own.
        bases = found.__mro__ if isinstance(found, type) else ()
        if path == key and kind not in {base.__name__ for base in bases}:
            raise ConfigError(f"{path}._target_={target}: must be a {kind}")


def builds_parts(found: Any, own: tuple[str, ...]) -> bool:
    """Whether it is a part of models and data, or a function that makes one."""
    # Where it is defined counts: `project.train.sys.exit` is not of the project.
    place = f"{getattr(found, '__module__', '')}."
    is_own = place.startswith(own)
    if not is_own and not place.startswith(LIBRARIES):
        return False
    if not isinstance(found, type):
        try:
            found = typing.get_type_hints(found).get("return")
        except (NameError, TypeError):
            return False
    if not isinstance(found, type):
        return False
    return issubclass(found, OWN_KINDS if is_own else KINDS) or (
        place.startswith("torchvision.transforms.")
        or "LightningDataModule" in {base.__name__ for base in found.__mro__}
    )


def untrusted(path: str, target: str) -> ConfigError:
    """The error for a target that only the configuration of the run names."""
    return ConfigError(
        f"{path}._target_={target}: is not a network, optimizer, schedule or data set of the "
        "project, nor named in configs/model or configs/data, and loading would call it. If you "
        "trust whoever made this run directory, add --trust (in Python, trust=True)"
    )


def find_configured() -> set[str]:
    """Each ``_target_`` that the files of configs/ have for the model or the data."""
    try:
        folders = config_folders()
    except ConfigError:
        return set()  # the installed package loads a run, far from its project
    found: set[str] = set()
    for configs, file in [(folder, file) for folder in folders for file in folder.rglob("*.yaml")]:
        with suppress(OSError, ValueError, yaml.YAMLError):  # half of a file that is being written
            content = yaml.safe_load(file.read_text("utf-8"))
            if file.relative_to(configs).parts[0] not in ("model", "data"):
                # An experiment, or this machine's settings; loggers and callbacks may write files.
                is_dict = isinstance(content, dict)
                content = [content.get("model"), content.get("data")] if is_dict else []
            for path, node in walk(content):
                if path.rpartition(".")[2] == "_target_" and isinstance(node, str):
                    found.add(node)
    return found
