"""Whose the objects in a cluster are: of this run, of another one, or of a stranger.

A name proves nothing: a Service ``redis`` may belong to anyone. The labels of ``identity`` in
k8s/labels.yaml do, because only samestep writes them. Slurm has no labels, so there they are in the
comment of a job. Beside them each object of Kubernetes says which launch made it, and who launched.
"""

import copy
import getpass
import re
import socket
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from samestep.errors import ConfigError
from samestep.launch import kubectl, volume
from samestep.launch.render import Manifest

RUN, PROJECT, TARGET = (f"{kubectl.IDENTITY}{name}" for name in ("run", "project", "target"))
LAUNCH = f"{kubectl.IDENTITY}launch"  # a label of its own for each launch, which no other has
AUTHOR = f"{kubectl.IDENTITY}launched-by"  # an annotation
LABEL = re.compile(rf"""({kubectl.IDENTITY}\w+)["'=:,\s]+(?:value["'=:,\s]+)?([^\s"',;]+)""")
"""A label in any text: ``key=value``, YAML, JSON, also ``{"name": key, "value": value}``."""


def sign(manifests: Sequence[Manifest], launch: str) -> list[Manifest]:
    """Add to each manifest which launch makes it, and who launches.

    Not in the templates: what ``--render`` prints stays the same, and so does a later launch.
    """
    signed = copy.deepcopy(list(manifests))
    for manifest in signed:
        metadata = manifest["metadata"]
        metadata["labels"][LAUNCH] = launch
        metadata.setdefault("annotations", {})[AUTHOR] = find_author()
    return signed


def find_author() -> str:
    """Find who launches, and where: ``me@workstation``."""
    try:
        user = getpass.getuser()
    # In a container the user may have a number only; Python 3.13 changed the error.
    except (OSError, KeyError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def describe_author(found: Manifest) -> str:
    """Describe who launched a run and when: ``by me@workstation since 2026-11-27T04:00:00Z``."""
    metadata = found["metadata"]
    author = metadata.get("annotations", {}).get(AUTHOR, "someone")
    return f"by {author} since {metadata['creationTimestamp']}"


def find_own(cfg: DictConfig, manifests: Sequence[Manifest]) -> list[Manifest]:
    """Find the objects of the run in the cluster.

    Raises:
        ConfigError: if another run, or someone else, has an object of a name that the run needs.
    """
    found = kubectl.find_existing(cfg, manifests)
    for item in found:
        if not kubectl.has_identity(item, manifests):
            raise build_foreign_error(cfg, item, manifests)
    return found


def build_foreign_error(
    cfg: DictConfig, found: Manifest, manifests: Sequence[Manifest]
) -> ConfigError:
    """Build the error for an object that has a name of the run, and belongs to another one."""
    return build_conflict(
        cfg,
        f"{found['kind']} {found['metadata']['name']}",
        found["metadata"].get("labels", {}),
        kubectl.find_identity(manifests),
        since=f", since {found['metadata']['creationTimestamp']}",
        author=f", launched {describe_author(found)}",
    )


def build_conflict(
    cfg: DictConfig,
    place: str,
    labels: Mapping[str, str],
    ours: Mapping[str, str],
    *,
    since: str = "",
    author: str = "",
) -> ConfigError:
    """Build the error for something with the name of the run that belongs to another one.

    Args:
        cfg: of the run.
        place: what it is, and its name.
        labels: that it has.
        ours: the labels of the run.
        since: when it was made, for the end of a clause.
        author: who made it, and when, for the end of a clause.
    """
    if RUN not in labels:
        return ConfigError(
            f"{cfg.run_id}: the cluster has another {place}{since}, which is of no run of "
            "samestep; choose another RUN_ID"
        )
    target = labels.get(TARGET)
    is_ours_elsewhere = all(labels.get(key) == ours[key] for key in (RUN, PROJECT))
    if not is_ours_elsewhere:
        return ConfigError(
            f"{cfg.run_id}: {place} belongs to the run {labels[RUN]} of the project "
            f"{labels.get(PROJECT)}{author}; choose another RUN_ID"
        )
    return ConfigError(
        f"{cfg.run_id}: is a run with cluster={target}{author}, and a name is one run "
        f"on all clusters; cancel it first (samestep cancel {cfg.run_id} cluster={target}), or "
        "choose another RUN_ID"
    )


def read_labels(text: str) -> dict[str, str]:
    """Read samestep's labels from a text, such as the comment of a job, or an object as JSON."""
    return dict(LABEL.findall(text))


def build_taken_error(cfg: DictConfig, manifests: Sequence[Manifest]) -> kubectl.AlreadyExistsError:
    """Build the error of the slower of two launches at the same time."""
    # A claim is shared by all runs, so another run may have created it.
    found = find_own(cfg, [item for item in manifests if item["kind"] != volume.CLAIM])
    if not found:
        return kubectl.AlreadyExistsError(
            f"{cfg.run_id}: another launch has just created one of its objects; launch it again"
        )
    return kubectl.AlreadyExistsError(
        f"{cfg.run_id}: was launched at the same time {describe_author(found[0])}, and "
        f"that run stays; follow it (samestep logs {cfg.run_id} cluster={cfg.cluster.name}), or "
        "choose another RUN_ID"
    )
