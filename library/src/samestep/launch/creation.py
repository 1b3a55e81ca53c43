"""Create the objects of a run in a Kubernetes cluster: all of them, or none.

The owner object comes first, and the others name it as their owner: whatever ends the run, the
cluster removes them with it. What a launch has made it takes back if it cannot make the rest.
"""

import json
import secrets
import sys
from collections.abc import Sequence
from typing import NamedTuple

from omegaconf import DictConfig

from samestep.errors import ConfigError, RunError
from samestep.launch import kubectl, kubeflow, ownership, volume
from samestep.launch.render import Manifest

BEFORE_OWNER = ("TrainingRuntime",)  # Trainer rejects a TrainJob without it


class Parts(NamedTuple):
    """The objects to create, in this order."""

    claims: list[Manifest]
    before: list[Manifest]  # what the owner needs
    owner: list[Manifest]  # none if the run is in the cluster already
    others: list[Manifest]  # what names the owner


def create_missing(
    cfg: DictConfig, manifests: Sequence[Manifest], existing: Sequence[Manifest]
) -> None:
    """Create the objects that do not exist; if one cannot be created, remove the new ones.

    Args:
        cfg: of the run.
        manifests: of all objects of the run.
        existing: objects of the run in the cluster.
    """
    launch = secrets.token_hex(4)
    known = {kubectl.build_resource_name(item) for item in existing}
    missing = [item for item in manifests if kubectl.build_resource_name(item) not in known]
    signed = ownership.sign(missing, launch)
    try:
        create_in_order(cfg, manifests, sort_parts(signed))
    # Ctrl-C as well: the user sees an unfinished launch.
    except (ConfigError, RunError, KeyboardInterrupt):
        take_back(cfg, signed, launch)
        raise


def sort_parts(signed: Sequence[Manifest]) -> Parts:
    """Sort the objects to create by the moment when each of them may exist."""
    parts = Parts([], [], [], [])
    for manifest in signed:
        kind = manifest["kind"]
        if kind == volume.CLAIM:
            parts.claims.append(manifest)
        elif kind in BEFORE_OWNER:
            parts.before.append(manifest)
        elif kind in kubectl.RUNS:
            parts.owner.append(manifest)
        else:
            parts.others.append(manifest)
    return parts


def create_in_order(cfg: DictConfig, manifests: Sequence[Manifest], parts: Parts) -> None:
    """Create objects: the claim, what the owner needs, the owner, and what names it as its owner.

    Args:
        cfg: of the run.
        manifests: of all objects of the run.
        parts: those to create.
    """
    create_claim(cfg, parts.claims)
    try:
        # Of two launches at the same time, only one creates the first of these.
        create(cfg, parts.before)
        create_owner(cfg, parts.owner)
    except kubectl.AlreadyExistsError:
        raise ownership.build_taken_error(cfg, manifests) from None
    run = kubectl.get_run(cfg, manifests)
    if not run:
        raise RunError(f"{cfg.run_id}: was removed while it was launched; launch it again")
    reference = build_reference(run)
    add_owner(cfg, parts.before, reference)
    for manifest in parts.others:
        manifest["metadata"]["ownerReferences"] = [reference]
    try:
        create(cfg, parts.others)
    except kubectl.AlreadyExistsError:
        reject_other_owner(cfg, manifests, run)


def create(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Create the objects of the manifests, and print what kubectl says."""
    if manifests:
        print(kubectl.create(cfg, manifests), end="")


def create_claim(cfg: DictConfig, claims: Sequence[Manifest]) -> None:
    """Create the claim of the volume, unless another run is faster: all runs share it."""
    try:
        create(cfg, claims)
    except kubectl.AlreadyExistsError:
        print(f"{cfg.run_id}: the claim {cfg.cluster.volume} exists, and stays as it is")


def create_owner(cfg: DictConfig, owner: Sequence[Manifest]) -> None:
    """Create the owner object of the run, if it is missing, and print what was done."""
    for manifest in owner:
        # The SDK would leave out what a patch adds.
        is_for_sdk = manifest["kind"] == "TrainJob" and cfg.cluster.job_patch is None
        if is_for_sdk and kubeflow.is_installed():
            print(kubeflow.create(cfg, manifest), end="")
        else:
            create(cfg, [manifest])


def build_reference(run: Manifest) -> Manifest:
    """Build the reference of an object to its owner: when that goes, the cluster removes it.

    It does not block the deletion of the run: the Service stays while the pods save.
    """
    return {
        "apiVersion": run["apiVersion"],
        "kind": run["kind"],
        "name": run["metadata"]["name"],
        "uid": run["metadata"]["uid"],
    }


def add_owner(cfg: DictConfig, manifests: Sequence[Manifest], reference: Manifest) -> None:
    """Give the objects that were created before their owner a reference to it."""
    if not manifests:
        return
    patch = json.dumps({"metadata": {"ownerReferences": [reference]}})
    options = ("--filename=-", "--type=merge", f"--patch={patch}")
    try:
        kubectl.call(cfg, "patch", *options, manifests=manifests)
    except RunError as error:
        # The run has started all the same.
        kinds = ", ".join(manifest["kind"] for manifest in manifests)
        print(f"{cfg.run_id}: {kinds} will stay when the run is removed; {error}")


def reject_other_owner(cfg: DictConfig, manifests: Sequence[Manifest], run: Manifest) -> None:
    """Raise a RunError if an object beside the run is not the run's, but exists already."""
    # Another launch of this very run may have created what was missing.
    for item in ownership.find_own(cfg, manifests):
        owners = [reference["uid"] for reference in item["metadata"].get("ownerReferences", ())]
        if item["kind"] != run["kind"] and run["metadata"]["uid"] not in owners:
            place = f"{item['kind']} {item['metadata']['name']}"
            raise RunError(
                f"{cfg.run_id}: the cluster has another {place}, launched "
                f"{ownership.describe_author(item)}; choose another RUN_ID, or cancel that run"
            )


def take_back(cfg: DictConfig, signed: Sequence[Manifest], launch: str) -> None:
    """Remove what a launch has created, but for the claim; name what cannot be removed."""
    # Another run may use the claim by now, and its files would go with it.
    signed = [item for item in signed if item["kind"] != volume.CLAIM]
    if not signed:
        return
    # By the label of this launch: an object of this name may be that of a faster one.
    options = (f"--selector={ownership.LAUNCH}={launch}", "--ignore-not-found", "--wait=false")
    try:
        kubectl.call(cfg, "delete", kubectl.build_kinds(signed), *options)
    except RunError:
        names = ", ".join(f"{item['kind']} {item['metadata']['name']}" for item in signed)
        print(
            f"{cfg.run_id}: may have left {names} in the cluster, and could not remove them; "
            f"samestep cancel {cfg.run_id} does it",
            file=sys.stderr,
        )
