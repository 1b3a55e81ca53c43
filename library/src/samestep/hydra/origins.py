"""Which file, or the command line, has set a key. Imports no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.nodes import as_list, flatten
from samestep.hydra.project import find_config, project_folder
from samestep.hydra.schema import OVERLAYS


def find_overridden(choices: Mapping[str, Any], typed: Sequence[str]) -> dict[str, str]:
    """The keys that differ from their default files, with what has set them.

    Args:
        choices: the chosen files, as in the key ``choices`` of a configuration.
        typed: the overrides of the command line.

    Returns:
        By full key, such as ``model.optimizer.lr``, or ``model`` for a choice of a file:
        ``configs/experiment/mine.yaml`` or ``the command line``.
    """
    found = find_origins(choices, OVERLAYS)
    for word in typed:
        key = re.split("[=@]", word.lstrip("+~"))[0]
        found[key.replace("/", ".")] = "the command line"
    return found


def find_origins(choices: Mapping[str, Any], groups: Iterable[str]) -> dict[str, str]:
    """The keys that the chosen files of these groups set, with the file whose value counts."""
    found: dict[str, str] = {}
    # Overlays last: Hydra merges them over the other groups.
    for group in sorted(groups, key=lambda group: group in OVERLAYS):
        for name in as_list(choices.get(group)):
            found |= _keys_of(group, name)
    return found


def _keys_of(group: str, name: str) -> dict[str, str]:
    """The keys that a file and the files of its defaults list set, each with its file."""
    path = find_config(group, name)
    if path is None:
        return {}
    node = OmegaConf.load(path)
    assert isinstance(node, DictConfig)
    found: dict[str, str] = {}
    keys = []
    for entry in node.pop("defaults", None) or []:
        if isinstance(entry, DictConfig):
            # Such as `override /model/optimizer: sgd`, which sets model.optimizer.
            keys += [str(key).split("/", 1)[-1].replace("/", ".") for key in entry]
        elif entry != "_self_":
            found |= _keys_of(group, str(entry))
    is_global = "@package _global_" in path.read_text()
    prefix = "" if is_global else f"{group.replace('/', '.')}."
    keys += [f"{prefix}{key}" for key in flatten(node)]
    # After the files that it includes, because its own values win.
    return found | dict.fromkeys(keys, _shown(path))


def _shown(path: Path) -> str:
    project = project_folder()
    # A folder of the search path may be outside of the project.
    if path.is_relative_to(project):
        path = path.relative_to(project)
    return path.as_posix()
