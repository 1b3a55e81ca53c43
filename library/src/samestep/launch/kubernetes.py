"""Check, submit and cancel a run in a Kubernetes cluster, by kubectl."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.hydra.nodes import walk
from samestep.launch import kubectl, kubeflow, volume
from samestep.launch.explain import MAKE_CLAIM
from samestep.launch.follow import logs, status
from samestep.launch.kubectl import (
    RUNS,
    build_resource_name,
    find_outcome,
    find_owner,
    get_pods,
    is_training_pod,
)
from samestep.launch.poll import EXTRA_S, poll
from samestep.launch.render import Manifest

KEPT_KINDS = (volume.CLAIM,)  # these objects outlive a run that is cancelled
ANSWER_S = 5  # seconds in which a cluster must answer; otherwise the check continues without it
NOT_JUDGED = re.compile("must be created before|runtime '.*' not found")
"""Errors of a dry run that says nothing: either Trainer or Kueue misses the runtime of a TrainJob.

A dry run creates nothing, so the TrainJob refers to a runtime that does not exist yet.
"""


def check(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Ask the cluster, if there is one, whether it would accept the objects and the pods."""
    print(f"{cfg.run_id}: no errors in the configuration")
    try:
        kubectl.call(cfg, "get", "--raw=/version", timeout_s=ANSWER_S)
    except RunError as error:
        print(f"{cfg.run_id}: no cluster was checked; {error}")
        return 0
    manifests = volume.leave_existing_claim(cfg, manifests)
    try:
        kubectl.apply(cfg, manifests, "--dry-run=server")
    except RunError as error:
        if not NOT_JUDGED.search(str(error)):
            raise
        kind = manifests[-1]["kind"]
        print(f"{cfg.run_id}: the cluster can judge the {kind} only when it is submitted")
    check_pod(cfg, manifests)
    reject_missing_claim(cfg, manifests)
    print(f"{cfg.run_id}: the cluster would accept it (strict dry run of its server)")
    return 0


def check_pod(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Ask the cluster for a pod as a controller would make it.

    The API server itself judges only the pods of Jobs before they are made. Pod Security and quotas
    do not even judge these.
    """
    # A Deployment is that of etcd.
    own = [manifest for manifest in manifests if manifest["kind"] != "Deployment"]
    template = find_pod_template(own)
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
        # In many clusters users may create Jobs, and only controllers create pods.
        if "may not create pods" not in str(error):
            raise


def find_pod_template(tree: Any) -> Any:
    """Find the first pod template within ``tree``."""
    # Each kind of object has it at another place, and a JobSet in a list.
    for _, node in walk(tree):
        if not isinstance(node, dict):
            continue
        if "containers" in node.get("spec", {}):
            return node
    raise AssertionError("a run has pods")


def reject_missing_claim(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Raise a RunError if the pods would wait for a volume claim that does not exist."""
    name = cfg.cluster.volume
    kinds = [manifest["kind"] for manifest in manifests]
    if name is None or volume.CLAIM in kinds:
        return
    if kubectl.is_missing(cfg, "persistentvolumeclaims", name):
        raise RunError(
            f"cluster.volume={name}: there is no such claim in the namespace; {MAKE_CLAIM}"
        )


def submit(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Start the run, or start it again after it ended; change nothing while it runs."""
    owner = find_owner(manifests)
    run = kubectl.get(cfg, build_resource_name(owner))
    if run:
        outcome = find_outcome(run)
        is_same = was_submitted(run, owner)
        reject_running(cfg, run, is_same=is_same)
        if outcome and is_same:
            print(f"{cfg.run_id}: is finished, nothing to do; another RUN_ID starts a new run")
            return 0
        if outcome is not None:
            state = "finished" if outcome else "failed"
            print(f"{cfg.run_id}: {state} before, and starts again")
            # The fields of an ended Job cannot be changed, so it is created again.
            remove_all(cfg, manifests)
    # A run that is not ended is applied too: objects beside it may be missing.
    manifests = volume.leave_existing_claim(cfg, manifests)
    if owner["kind"] == "TrainJob" and kubeflow.is_installed():
        print(kubeflow.create(cfg, manifests), end="")
    else:
        print(kubectl.apply(cfg, manifests), end="")
    make_owner(cfg, manifests)
    return 0


def was_submitted(run: Manifest, owner: Manifest) -> bool:
    """Whether the run in the cluster was submitted with the same values as ``owner``."""
    # Its own spec cannot be compared: the cluster adds defaults to it. kubectl notes what it sent.
    annotations = run["metadata"].get("annotations", {})
    noted = json.loads(annotations.get(kubeflow.SUBMITTED_ANNOTATION, "{}"))
    # Through JSON, because the note has texts for keys that are numbers here.
    sent = json.loads(json.dumps(owner["spec"]))
    return bool(noted.get("spec") == sent)


def reject_running(cfg: DictConfig, run: Manifest, *, is_same: bool) -> None:
    """Raise a RunError if the run cannot be submitted, because of what it does now."""
    if run["metadata"].get("deletionTimestamp"):
        raise RunError(f"{cfg.run_id}: is still being cancelled; wait for that")
    if find_outcome(run) is None and not is_same:
        raise RunError(
            f"{cfg.run_id}: is running with other overrides; cancel it first "
            f"(samestep cancel {cfg.run_id}), then this submit resumes it, or choose another "
            "RUN_ID"
        )


def make_owner(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Make the object of the run the owner of the others: when it goes, the cluster removes them.

    They are created before, because the pods need them. A later ``kubectl apply`` keeps the
    reference, which is not in the manifests. It does not block the deletion of the run: the Service
    stays while the pods save.
    """
    run = kubectl.get(cfg, build_resource_name(find_owner(manifests)))
    owned = find_owned(manifests)
    if not owned or not run:
        return
    owner = {
        "apiVersion": run["apiVersion"],
        "kind": run["kind"],
        "name": run["metadata"]["name"],
        "uid": run["metadata"]["uid"],
    }
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    options = ("--filename=-", "--type=merge", f"--patch={patch}")
    try:
        kubectl.call(cfg, "patch", *options, manifests=owned)
    except RunError as error:
        # The run has started all the same.
        kinds = ", ".join(manifest["kind"] for manifest in owned)
        print(f"{cfg.run_id}: {kinds} will stay when the run is removed; {error}")


def find_owned(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Find the manifests of the objects that are removed with the run."""
    return [item for item in manifests if item["kind"] not in (*RUNS, *KEPT_KINDS)]


def fill_volume(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Run the Job that puts data into the volume; return 0 when the data are ready, or 1."""
    job = kubectl.get(cfg, build_resource_name(find_owner(manifests)))
    if find_outcome(job) is not None:
        # The files may have been removed in the meantime, so the Job looks again.
        remove_all(cfg, manifests)
    submit(cfg, manifests)
    return logs(cfg, manifests)


def cancel(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """End the run so that its pods can save; then remove everything that belongs to it."""
    run = kubectl.get(cfg, build_resource_name(find_owner(manifests)))
    existed = remove_all(cfg, manifests)
    if run:
        state = "cancelled; the same submit resumes it"
    elif existed:
        state = "had ended; its objects are removed"
    else:
        # Nothing is found in a namespace that does not exist, and then the name is the error.
        kubectl.reject_missing_namespace(cfg)
        state = "nothing to cancel"
    print(f"{cfg.run_id}: {state}")
    return 0


def remove_all(cfg: DictConfig, manifests: Sequence[Manifest]) -> bool:
    """Remove all objects of the run, and wait for its pods; return whether there were any."""
    name = build_resource_name(find_owner(manifests))
    run = kubectl.get(cfg, name)
    if run:
        remove_owner(cfg, run, name)
    # The pods need their Service and their volume while they save, so these come afterwards.
    owned = find_owned(manifests)
    answer = ""
    if owned:
        # A run that is submitted again must not find an old object, which is about to go.
        options = ("--filename=-", "--ignore-not-found", f"--timeout={EXTRA_S}s")
        answer = kubectl.call(cfg, "delete", *options, manifests=owned)
    wait_until_none(cfg, lambda: len(get_pods(cfg)))
    return bool(run) or bool(answer.strip())


def remove_owner(cfg: DictConfig, run: Manifest, name: str) -> None:
    """Remove the owner object of the run, and wait until its pods have saved and ended."""
    if "Running" in kubectl.find_phases(get_pods(cfg)):
        print(f"{cfg.run_id}: its pods have {cfg.cluster.grace_s} seconds to save", flush=True)
    cascade = "foreground"
    if run["kind"] == "TrainJob":
        # In the foreground the cluster removes what a TrainJob owns before the TrainJob itself.
        # Without its TrainingRuntime Trainer's webhook then denies every change of it, also its
        # removal.
        cascade = "background"
    options = (f"--cascade={cascade}", "--ignore-not-found", "--wait=false")
    kubectl.call(cfg, "delete", name, *options)

    def count_remaining() -> int:
        num_pods = sum(is_training_pod(cfg, pod) for pod in get_pods(cfg))
        # The owner object itself goes a moment after its last pod.
        return num_pods or int(bool(kubectl.get(cfg, name)))

    wait_until_none(cfg, count_remaining)


def wait_until_none(cfg: DictConfig, count_remaining: Callable[[], int]) -> None:
    """Wait until nothing remains, and print the number of pods whenever it changes."""
    limit_s = cfg.cluster.grace_s + EXTRA_S
    before = 0
    for number in poll(count_remaining, limit_s):
        if not number:
            return
        if number != before:
            plural = "s" * (number > 1)
            print(f"{cfg.run_id}: waits for {number} pod{plural} to end", flush=True)
        before = number
    raise RunError(
        f"{cfg.run_id}: {before} left after {limit_s} seconds; check "
        f"samestep status {cfg.run_id}, and cancel again"
    )


ACTIONS = {
    "check": check,
    "submit": submit,
    "data": fill_volume,
    "logs": logs,
    "status": status,
    "cancel": cancel,
}
