"""The overrides of each run that was submitted here: ``samestep logs NAME`` needs only the name.

They stand in ``<run_root>/<run_id>/launch.yaml``. No secret is among them, because ``check``
rejects one before a run is submitted. On another machine the cluster is typed again.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from samestep.errors import ConfigError
from samestep.hydra.project import configs_folder
from samestep.hydra.rules import NAME

HEADER = "# Overrides of samestep launch, for samestep logs, status and cancel.\n"


def save(run_id: str, overrides: Sequence[str]) -> bool:
    """Write the overrides of a run that was submitted; return whether that was possible."""
    path = path_of(run_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + yaml.safe_dump({"overrides": list(overrides)}, width=1000))
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}): type the overrides again to follow")
        return False
    return True


def load(run_id: str, typed: Sequence[str]) -> list[str]:
    """Return the overrides with which a run was submitted, and then those of ``typed``."""
    if not NAME.holds(run_id):
        raise ConfigError(f"{run_id}: is not the name of a run; type it before the overrides")
    path, cluster = path_of(run_id), cluster_of(typed)
    submitted = read_file(path)
    if submitted is None:
        if cluster in (None, "local"):
            raise ConfigError(
                f"{run_id}: {path} does not exist, so it was not submitted here; if it was "
                "submitted elsewhere, add its cluster, such as cluster=k8s cluster.namespace=NAME"
            )
        return list(typed)
    if cluster not in (None, cluster_of(submitted)):
        raise ConfigError(
            f"cluster={cluster}: {run_id} was submitted with cluster={cluster_of(submitted)} "
            f"({path}); leave out cluster=, or name another run"
        )
    return [*submitted, *typed]


def path_of(run_id: str) -> Path:
    """Return the file that remembers a run on this machine.

    It is in the ``run_root`` of the YAML files. One that is typed may be a folder of the pods, and
    the name alone must find the file again.
    """
    files = [configs_folder() / name for name in ("train.yaml", "local/default.yaml")]
    settings = OmegaConf.unsafe_merge(*(OmegaConf.load(file) for file in files if file.exists()))
    return Path(str(OmegaConf.select(settings, "run_root")), run_id, "launch.yaml")


def cluster_of(overrides: Sequence[str]) -> str | None:
    """Return the cluster that the overrides choose; None if they choose none."""
    chosen = [word.removeprefix("cluster=") for word in overrides if word.startswith("cluster=")]
    return chosen[-1] if chosen else None


def read_file(path: Path) -> list[str] | None:
    """Read what this machine remembers of a run; None if it was not submitted here."""
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}; delete it") from None
    overrides = content.get("overrides") if isinstance(content, dict) else None
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(f"{path}: has no list of overrides; delete it")
    return overrides
