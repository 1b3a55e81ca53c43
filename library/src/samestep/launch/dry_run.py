"""Ask a Kubernetes cluster whether it would accept a run, before anything of it exists."""

import copy
import re
import secrets
import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.launch import kubectl, ownership, patch, volume
from samestep.launch.explain import MAKE_CLAIM
from samestep.launch.render import Manifest

NOT_JUDGED = re.compile("must be created before|runtime '.*' not found|does not support dry run")
"""Errors of a dry run that says nothing: Trainer or Kueue misses the runtime of a TrainJob.

A dry run creates nothing, so the TrainJob refers to a runtime that does not exist yet. And there
are webhooks that answer no dry run.
"""
NEEDED = {  # the key with the name of an object that must exist, its kind, and its word
    "volume": ("persistentvolumeclaims", "claim in the namespace"),
    "priority_class": ("priorityclasses.scheduling.k8s.io", "PriorityClass"),
    "pull_secret": ("secrets", "Secret in the namespace"),
    "queue": ("localqueues.kueue.x-k8s.io", "LocalQueue in the namespace"),
    "queue_priority": ("workloadpriorityclasses.kueue.x-k8s.io", "WorkloadPriorityClass"),
}


def judge(
    cfg: DictConfig, manifests: Sequence[Manifest], existing: Sequence[Manifest] = ()
) -> None:
    """Raise a RunError or ConfigError if the cluster would reject an object or the pods of the run.

    Args:
        cfg: of the run.
        manifests: of the objects to create.
        existing: objects of these names in the cluster.
    """
    try:
        judge_objects(cfg, rename(manifests, existing))
    except kubectl.AlreadyExistsError:
        # Another launch has created them since ``existing`` was read.
        raise ownership.build_taken_error(cfg, manifests) from None
    try:
        judge_pod(cfg, manifests)
    except kubectl.QuotaError:
        # The pods of a run that runs are among those that use the quota up.
        if not is_running(existing):
            raise
    reject_missing(cfg, manifests)


def is_running(existing: Sequence[Manifest]) -> bool:
    """Whether the objects in the cluster are of a run that has not ended."""
    owners = [item for item in existing if item["kind"] in kubectl.RUNS]
    return any(kubectl.find_outcome(owner) is None for owner in owners)


@contextmanager
def before_anything_exists() -> Iterator[None]:
    """Turn what the cluster rejects into a ConfigError: nothing was made, so nothing can be lost.

    A cluster that does not answer, or does not know the user, has rejected nothing. And what
    another launch has created in the meantime is not the user's mistake.
    """
    try:
        yield
    except (kubectl.NoAnswerError, kubectl.LoginError, kubectl.AlreadyExistsError):
        raise
    except RunError as error:
        raise ConfigError(str(error)) from None


def rename(manifests: Sequence[Manifest], existing: Sequence[Manifest]) -> list[Manifest]:
    """Give other names to manifests whose objects exist: otherwise only that would be said."""
    known = {(item["kind"], item["metadata"]["name"]) for item in existing}
    renamed = copy.deepcopy(list(manifests))
    for manifest in renamed:
        name = manifest["metadata"]["name"]
        if (manifest["kind"], name) in known:
            # Of the same length, which some controllers limit.
            letters = [secrets.choice(string.ascii_lowercase) for _ in name]
            manifest["metadata"]["name"] = "".join(letters)
    return renamed


def judge_objects(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Have the cluster create the objects in a dry run; print its warnings."""
    options = ("--dry-run=server", "--validate=strict", "--filename=-")
    try:
        kubectl.call(cfg, "create", *options, manifests=manifests, shows_warnings=True)
    except RunError as error:
        if not NOT_JUDGED.search(str(error)):
            raise
        kind = kubectl.find_owner(manifests)["kind"]
        print(f"{cfg.run_id}: the cluster can judge the {kind} only when it is submitted")


def judge_pod(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Ask the cluster for a pod as a controller would make it.

    The API server itself judges only the pods of Jobs before they are made. Pod Security and quotas
    do not even judge these.
    """
    template = next(patch.find_pod_templates(cfg, manifests))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{cfg.run_id}-check", **template.get("metadata", {})},
        "spec": template["spec"],
    }
    # Not `apply`, which also wants the right to read pods.
    options = ("--dry-run=server", "--validate=strict", "--filename=-")
    try:
        kubectl.call(cfg, "create", *options, manifests=[pod])
    except RunError as error:
        is_judged = NOT_JUDGED.search(str(error)) is None
        # In many clusters users may create Jobs, and only controllers create pods.
        if is_judged and "may not create pods" not in str(error):
            raise


def reject_missing(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Raise a ConfigError if the pods would wait for an object that does not exist."""
    kinds = [manifest["kind"] for manifest in manifests]
    for key, (kind, word) in NEEDED.items():
        name = cfg.cluster[key]
        is_made = key == "volume" and volume.CLAIM in kinds
        if name is None or is_made:
            continue
        reason = kubectl.why_missing(cfg, kind, name)
        if not reason:
            continue
        remedy = f"have it created, or leave out cluster.{key}"
        if key == "volume":
            remedy = MAKE_CLAIM
        raise ConfigError(f"cluster.{key}={name}: {reason.replace('object', word)}; {remedy}")
