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
from samestep.launch.kubectl import RUNS, build_resource_name, find_outcome, find_owner, get_pods
from samestep.launch.poll import EXTRA_S, poll
from samestep.launch.render import Manifest

KEPT_KINDS = (volume.CLAIM,)  # these objects outlive a run that is cancelled
ANSWER_S = 5  # seconds in which a cluster must answer; otherwise the check continues without it


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
        # A dry run creates nothing, so the TrainJob refers to a runtime that is missing. Either
        # Trainer or Kueue says so first.
        if not re.search("must be created before|runtime '.*' not found", str(error)):
            raise
        kind = manifests[-1]["kind"]
        print(f"{cfg.run_id}: the cluster can judge the {kind} only when it is submitted")
    check_pod(cfg, manifests)
    reject_missing_claim(cfg, manifests)
    print(f"{cfg.run_id}: the cluster would accept it (strict dry run of its server)")
    return 0


def check_pod(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Ask the cluster for a pod as a controller would make it.

    The API server itself judges only the pods of Jobs before they are made, and Pod Security and
    quotas not even these.
    """
    # A Deployment is that of etcd.
    own = [manifest for manifest in manifests if manifest["kind"] != "Deployment"]
    template = find_pod_template(own)
    meta = {"name": f"{cfg.run_id}-check", **template.get("metadata", {})}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}
    # Not `apply`, which also wants the right to read pods.
    options = ("--dry-run=server", "--validate=strict", "--filename=-")
    try:
        kubectl.call(cfg, "create", *options, manifests=[pod])
    except RunError as error:
        if "may not create pods" not in str(error):  # only controllers may
            raise


def find_pod_template(node: Any) -> Any:
    """Find the first pod template within ``node``; None if there is none."""
    parts = (part for _, part in walk(node) if isinstance(part, dict))
    return next((part for part in parts if "containers" in (part.get("spec") or {})), None)


def reject_missing_claim(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Raise a RunError if the pods would wait for a volume claim that nobody has created."""
    name = cfg.cluster.volume
    if name is None or any(manifest["kind"] == volume.CLAIM for manifest in manifests):
        return
    try:
        is_there = kubectl.get(cfg, "persistentvolumeclaims", name) is not None
    except RunError:
        return  # not everybody may read claims
    if not is_there:
        raise RunError(
            f"cluster.volume={name}: there is no such claim in the namespace; {MAKE_CLAIM}"
        )


def submit(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Start the run, or start it again after it ended; change nothing while it runs."""
    manifest = find_owner(manifests)
    run = kubectl.get(cfg, build_resource_name(manifest))
    if run is not None:
        if run["metadata"].get("deletionTimestamp"):
            raise RunError(f"{cfg.run_id}: is still being cancelled; wait for that")
        # kubectl has noted what was submitted.
        note = run["metadata"].get("annotations", {}).get(kubeflow.SUBMITTED_ANNOTATION, "{}")
        is_same = json.loads(note).get("spec") == json.loads(json.dumps(manifest["spec"]))
        outcome = find_outcome(run)
        if outcome is None and not is_same:
            raise RunError(
                f"{cfg.run_id}: is running with other overrides; cancel it first "
                f"(samestep cancel {cfg.run_id}), then this submit continues it, or choose another "
                "RUN_ID"
            )
        if outcome and is_same:
            print(f"{cfg.run_id}: is finished, nothing to do; another RUN_ID starts a new run")
            return 0
        if outcome is not None:
            print(f"{cfg.run_id}: {'finished' if outcome else 'failed'} before, and starts again")
            remove_all(cfg, manifests)

    manifests = volume.leave_existing_claim(cfg, manifests)
    if manifest["kind"] == "TrainJob" and kubeflow.is_installed():
        print(kubeflow.create(cfg, manifests), end="")
    else:
        print(kubectl.apply(cfg, manifests), end="")
    make_owner(cfg, manifests)
    return 0


def make_owner(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Make the object of the run the owner of the others: when it goes, the cluster removes them.

    They are created before, because the pods need them. A later ``kubectl apply`` keeps the
    reference, which is not in the manifests. It does not block the deletion of the run: the Service
    stays while the pods save.
    """
    manifest = find_owner(manifests)
    owned = [item for item in manifests if item["kind"] not in (*RUNS, *KEPT_KINDS)]
    run = kubectl.get(cfg, build_resource_name(manifest))
    if not owned or run is None:
        return
    owner = {key: run[key] for key in ("apiVersion", "kind")}
    owner |= {key: run["metadata"][key] for key in ("name", "uid")}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    try:
        kubectl.call(
            cfg, "patch", "--filename=-", "--type=merge", f"--patch={patch}", manifests=owned
        )
    except RunError as error:
        # The run has started all the same.
        kinds = ", ".join(item["kind"] for item in owned)
        print(f"{cfg.run_id}: {kinds} will stay when the run is removed; {error}")


def fill_volume(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Run the Job that puts data into the volume; return 0 when the data are ready, or 1."""
    if find_outcome(kubectl.get(cfg, build_resource_name(find_owner(manifests)))) is not None:
        # Somebody may have removed the files in the meantime, so the Job looks again.
        remove_all(cfg, manifests)
    submit(cfg, manifests)
    return logs(cfg, manifests)


def cancel(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """End the run so that its pods can save; then remove everything that belongs to it."""
    is_run = kubectl.get(cfg, build_resource_name(find_owner(manifests))) is not None
    existed = remove_all(cfg, manifests)
    if is_run:
        state = "cancelled; the same submit continues it"
    elif existed:
        state = "had ended; its objects are removed"
    else:
        kubectl.reject_missing_namespace(cfg)
        state = "nothing to cancel"
    print(f"{cfg.run_id}: {state}")
    return 0


def remove_all(cfg: DictConfig, manifests: Sequence[Manifest]) -> bool:
    """Remove all objects of the run, and wait for its pods; return whether there were any."""
    manifest = find_owner(manifests)
    address = build_resource_name(manifest)
    run = kubectl.get(cfg, address)
    if run is not None:
        if any(pod["status"].get("phase") == "Running" for pod in get_pods(cfg)):
            print(f"{cfg.run_id}: its pods have {cfg.cluster.grace_s} seconds to save", flush=True)
        # In the foreground the cluster removes what a TrainJob owns before the TrainJob itself.
        # Without its TrainingRuntime Trainer's webhook then denies every change of it, also its
        # removal.
        cascade = "background" if manifest["kind"] == "TrainJob" else "foreground"
        kubectl.call(
            cfg, "delete", address, f"--cascade={cascade}", "--ignore-not-found", "--wait=false"
        )
        wait_until_none(
            cfg,
            lambda: (
                sum(kubectl.is_training_pod(cfg, pod) for pod in get_pods(cfg))
                or int(kubectl.get(cfg, address) is not None)
            ),
        )
    # The pods need their Service and their volume while they save, so these come afterwards.
    rest = [item for item in manifests if item["kind"] not in (*RUNS, *KEPT_KINDS)]
    # A run that is submitted again must not find an old object, which is about to go.
    options = ("--filename=-", "--ignore-not-found", f"--timeout={EXTRA_S}s")
    answer = kubectl.call(cfg, "delete", *options, manifests=rest) if rest else ""
    wait_until_none(cfg, lambda: len(get_pods(cfg)))
    return run is not None or bool(answer.strip())


def wait_until_none(cfg: DictConfig, count_remaining: Callable[[], int]) -> None:
    """Wait until nothing remains, and print the number of pods whenever it changes."""
    limit_s, before = cfg.cluster.grace_s + EXTRA_S, 0
    for number in poll(count_remaining, limit_s):
        if not number:
            return
        if number != before:
            print(f"{cfg.run_id}: waits for {number} pod{'s' * (number > 1)} to end", flush=True)
        before = number
    raise RunError(
        f"{cfg.run_id}: {before} left after {limit_s} seconds; check "
        f"samestep status {cfg.run_id}, and cancel again"
    )


ACTIONS = {
    "check": check, "submit": submit, "data": fill_volume, "logs": logs, "status": status,
    "cancel": cancel,
}  # fmt: skip
