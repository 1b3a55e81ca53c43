"""The overrides of each run that was submitted here: ``samestep logs NAME`` needs only the name.

They are in ``<run_root>/<run_id>/launch.yaml``. No secret is among them, because ``check`` rejects
one before a run is submitted. On another machine the user must type the cluster again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.project import configs_folder
from samestep.hydra.rules import NAME
from samestep.ranks import environment
from samestep.run.layout import shorten
from samestep.run_spec import select

HEADER = "# Overrides of samestep launch, for samestep logs, status and cancel.\n"


def write(run_id: str, overrides: Sequence[str]) -> None:
    """Write the overrides of a run that is about to be submitted, or was."""
    path = path_of(run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + yaml.safe_dump({"overrides": list(overrides)}, width=1000))


def save(run_id: str, overrides: Sequence[str]) -> bool:
    """Write the overrides of a run that was submitted; return whether that was possible."""
    try:
        write(run_id, overrides)
    except OSError as error:
        # The run has started, so this is no error of the command.
        place = path_of(run_id)
        print(f"{place} cannot be written ({error.strerror}): type the overrides again to follow")
        return False
    return True


def load(run_id: str, typed: Sequence[str]) -> list[str]:
    """Return the overrides with which a run was submitted, and then those of ``typed``."""
    # `samestep logs cluster=k8s mine` would otherwise look for a run called cluster=k8s.
    if not NAME.holds(run_id):
        raise ConfigError(f"{run_id}: is not the name of a run; type it before the overrides")
    path = path_of(run_id)
    submitted = read_file(path)
    if submitted is None:
        reject_unknown_cluster(run_id, path, typed)
        return list(typed)
    cluster = cluster_of(typed)
    if cluster not in (None, cluster_of(submitted)):
        raise ConfigError(
            f"cluster={cluster}: {run_id} was submitted with cluster={cluster_of(submitted)} "
            f"({path}); leave out cluster=, or name another run"
        )
    return [*submitted, *typed]


def reject_unknown_cluster(run_id: str, path: Path, typed: Sequence[str]) -> None:
    """Raise a ConfigError if neither a file nor the user says in which cluster the run is."""
    if cluster_of(typed) not in (None, "local"):
        return
    logs = path.parent / "logs"
    if logs.is_dir():
        raise ConfigError(
            f"{run_id}: was trained here, not submitted; its messages are in {shorten(logs)}, and "
            f"`samestep runs` shows its state"
        )
    raise ConfigError(
        f"{run_id}: {path} does not exist, so it was not submitted here; if it was "
        "submitted elsewhere, add its cluster, such as cluster=k8s cluster.namespace=NAME"
    )


def path_of(run_id: str) -> Path:
    """Return the file with the overrides of a run on this machine."""
    settings: Any = OmegaConf.create()
    # Only the run_root of the YAML files counts. One that is typed may be a folder of the pods, and
    # the name alone must find the file again.
    for name in ("train.yaml", "local/default.yaml"):
        file = configs_folder() / name
        if file.exists():
            settings = OmegaConf.unsafe_merge(settings, OmegaConf.load(file))
    run_root = environment.expand_home(str(OmegaConf.select(settings, "run_root")), "run_root")
    return Path(run_root, run_id, "launch.yaml")


def cluster_of(overrides: Sequence[str]) -> str | None:
    """Return the cluster that the overrides choose; None if they choose none."""
    cluster = None
    for override in overrides:
        # As in Hydra the last one wins.
        if override.startswith("cluster="):
            cluster = override.removeprefix("cluster=")
    return cluster


def read_file(path: Path) -> list[str] | None:
    """Read the overrides from a file; None if there is none, as the run was not submitted here."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}; delete it") from None
    overrides = select(content, "overrides")
    if not is_list_of_texts(overrides):
        raise ConfigError(f"{path}: has no list of overrides; delete it")
    return list(overrides)


def is_list_of_texts(value: object) -> bool:
    """Whether ``value`` is a list in which every item is a text."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
