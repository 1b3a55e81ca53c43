"""What configs/local means for a run on a cluster: the pods do not have these files.

The keys of ``cluster`` in them say how this machine reaches its clusters, such as the image and the
namespace. They become overrides, which the pods get too. All other settings are of this machine
alone, such as the folder of the data: a run on a cluster is composed without them.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from samestep.hydra.compose import check as compose
from samestep.hydra.compose import local_cluster_keys, local_files, local_keys
from samestep.hydra.folder import configs_folder


def to_overrides(typed: Sequence[str]) -> list[str]:
    """Return ``typed`` with the keys of ``cluster`` in configs/local before them."""
    if not (configs_folder() / "local").is_dir():
        return list(typed)
    cfg = compose(typed)
    given = [word for word in typed if not word.startswith("local=")]
    if not local_files(cfg.choices):
        return given
    values = OmegaConf.to_container(cfg.cluster, resolve=True)
    assert isinstance(values, dict)
    keys = [key for key in local_cluster_keys(cfg.choices) if key in values]
    words = [f"cluster.{key}={write(values[key])}" for key in keys]
    if not any(word.startswith("cluster=") for word in given):
        words.insert(0, f"cluster={cfg.choices.cluster}")
    return [*words, *given]


def compose_for_cluster(overrides: Sequence[str]) -> DictConfig:
    """Compose what the pods will compose: configs/local is not there."""
    has_local = (configs_folder() / "local").is_dir()
    return compose([*overrides, "local=null"] if has_local else overrides)


def describe_kept(typed: Sequence[str]) -> list[str]:
    """Say which settings of configs/local do not reach the pods; nothing if all do."""
    if not (configs_folder() / "local").is_dir():
        return []
    choices = compose(typed).choices
    keys = [key for key in local_keys(choices) if not key.startswith("cluster.")]
    if not keys:
        return []
    files = ", ".join(f"configs/local/{file.name}" for file in local_files(choices))
    return [f"{files}: the pods get its keys of cluster, but not {', '.join(keys)}"]


def write(value: Any) -> str:
    """Write a value as it is typed in an override."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {write(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    # Hydra reads backslashes as escapes only where a quote follows.
    escaped = re.sub(r"(\\*)('|$)", double_backslashes, value)
    return f"'{escaped}'"


def double_backslashes(match: re.Match[str]) -> str:
    """Escape a quote, or the end of a text, and the backslashes before it."""
    backslashes, quote = match.groups()
    return 2 * backslashes + ("\\'" if quote else "")
