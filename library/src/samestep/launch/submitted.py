"""The overrides of each run that was submitted: ``action=logs`` needs only the name of the run.

This machine remembers it in ``<run_root>/<run_id>/launch.yaml``. Kubernetes remembers it too, as an
annotation of the run's NetworkPolicy (k8s/network.yaml), which serves other people and machines.
Both hold the overrides. No secret is among them, because ``check`` refuses to submit one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.errors import ConfigError, RunError
from samestep.hydra.compose import check as compose
from samestep.hydra.rules import NAME
from samestep.ranks import environment

ANNOTATION = "samestep/overrides"
HEADER = "# Overrides of action=submit, for action=logs, status and cancel of samestep launch.\n"


def name_of(typed: Sequence[str], action: str) -> str:
    """Find the name of an existing run: ``run_id=`` in ``typed``, or ``$RUN_ID``.

    Raises:
        ConfigError: if there is none, or no run can have it.
    """
    given = [word.partition("=")[2] for word in typed if word.lstrip("+").startswith("run_id=")]
    name = given[-1] if given else environment.run_id()
    if not name:
        raise ConfigError(
            f"RUN_ID: is not set; action={action} needs the name that action=submit printed"
        )
    if not NAME.holds(name):
        raise ConfigError(f"RUN_ID={name}: no run can have this name")
    return name


def remember(run_id: str, overrides: Sequence[str]) -> bool:
    """Write the overrides of a run that was submitted; return whether that was possible."""
    path = path_of(run_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEADER + yaml.safe_dump({"overrides": list(overrides)}, width=1000))
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}): type the overrides again to follow")
        return False
    return True


def recall(run_id: str, typed: Sequence[str]) -> list[str]:
    """Return the overrides with which a run was submitted, and then those of ``typed``.

    Raises:
        ConfigError: if the run is unknown and ``typed`` names no cluster, or another cluster.
    """
    path = path_of(run_id)
    source, reason = str(path), ""
    submitted = read_file(path)
    if submitted is None:
        source = f"the annotation {ANNOTATION}"
        submitted, reason = ask_cluster(run_id, typed)
    if submitted is None:
        if cluster_of(typed) in (None, "local"):
            raise ConfigError(
                f"RUN_ID={run_id}: {path} does not exist, and {reason}; if it was "
                "submitted, name its cluster: cluster=NAME"
            )
        return list(typed)
    cluster, before = cluster_of(typed), cluster_of(submitted)
    if cluster not in (None, before):
        raise ConfigError(
            f"cluster={cluster}: {run_id} was submitted with cluster={before} ({source}); "
            "leave out cluster=, or choose another RUN_ID"
        )
    return [*submitted, *typed]


def path_of(run_id: str) -> Path:
    """Return the file that remembers a run on this machine.

    It is in the ``run_root`` of the YAML files. One that is typed may be a folder of the pods, and
    the name alone must find the file again.
    """
    try:
        run_root = str(compose([]).run_root)
    except ConfigError:  # this project needs arguments
        run_root = "runs"
    return Path(run_root, run_id, "launch.yaml")


def cluster_of(overrides: Sequence[str]) -> str | None:
    """Return the cluster that the overrides choose; None if they choose none."""
    chosen = [word.removeprefix("cluster=") for word in overrides if word.startswith("cluster=")]
    return chosen[-1] if chosen else None


def read_file(path: Path) -> list[str] | None:
    """Read what this machine remembers of a run; None if it was not submitted here.

    Raises:
        ConfigError: if the file is damaged.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {type(error).__name__}; delete it") from None
    if not isinstance(content, dict) or not is_overrides(content.get("overrides")):
        raise ConfigError(f"{path}: has no list of overrides; delete it")
    return list(content["overrides"])


def ask_cluster(run_id: str, typed: Sequence[str]) -> tuple[list[str] | None, str]:
    """Read the overrides that Kubernetes remembers; otherwise return None and the reason."""
    cfg = compose([*([] if cluster_of(typed) else ["cluster=k8s"]), *typed])
    if "namespace" not in cfg.cluster:
        return None, "this cluster is not Kubernetes"
    from samestep.launch import kubectl

    try:
        policy = kubectl.get(cfg, f"networkpolicies.networking.k8s.io/{run_id}")
    except RunError as error:
        return None, str(error)
    annotations = (policy or {}).get("metadata", {}).get("annotations", {})
    # In manifests a $ is written twice, because Kubernetes replaces variables in arguments.
    submitted = json.loads(annotations.get(ANNOTATION, "null").replace("$$", "$"))
    if is_overrides(submitted):
        return submitted, ""
    where = f"namespace {cfg.cluster.namespace}" if cfg.cluster.namespace else "kubectl's namespace"
    return None, f"{where} has no run of this name"


def is_overrides(content: Any) -> bool:
    """Whether it is a list of strings."""
    return isinstance(content, list) and all(isinstance(word, str) for word in content)
