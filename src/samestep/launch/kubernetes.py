"""Check, submit and cancel a run in a Kubernetes cluster; kubectl does the talking."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import kubectl, kubeflow
from samestep.launch.follow import POLL_S, logs, status
from samestep.launch.kubectl import RUNS, Node, address, end_of, is_training, pods_of, run_of

KEPT = ("PersistentVolumeClaim",)  # what outlives a run that is cancelled
ANSWER_S = 5  # seconds in which a cluster says that it is there
LATE_S = 60  # seconds that pods may take to go, beyond their grace


def check(cfg: DictConfig, documents: Sequence[Node]) -> int:
    """Say that no mistake was found here; then let the cluster look, if there is one."""
    kinds = ", ".join(document["kind"] for document in documents)
    print(
        f"{cfg.run_id}: no mistakes in {kinds}: schemas, Pod Security Standard (restricted), "
        "names, numbers, images, secrets"
    )
    try:
        kubectl.call(cfg, "get", "--raw=/version", timeout_s=ANSWER_S)
    except RunError as error:
        print(f"{cfg.run_id}: no cluster was asked; {error}")
        return 0
    try:
        kubectl.call(
            cfg, "apply", "--dry-run=server", "--validate=strict", "--filename=-",
            documents=documents,
        )  # fmt: skip
    except RunError as error:
        if "is not in the cluster yet" not in str(error):  # a dry run leaves nothing to refer to
            raise
        print(
            f"{cfg.run_id}: the cluster can judge the {documents[-1]['kind']} only when submitted"
        )
        return 0
    print(f"{cfg.run_id}: the cluster would take it (strict dry run of its server)")
    return 0


def submit(cfg: DictConfig, documents: Sequence[Node]) -> int:
    """Start the run, or start it anew after it ended; leave it alone where it runs."""
    run = run_of(documents)
    there = kubectl.get(cfg, address(run))
    if there and there["metadata"].get("deletionTimestamp"):
        raise RunError(f"{cfg.run_id}: is still being cancelled; wait for that (action=status)")
    ok, same = end_of(there), applied(there) == json.loads(json.dumps(run["spec"]))
    if there and ok is None and not same:
        raise RunError(
            f"{cfg.run_id}: runs already, with other words; cancel it first (action=cancel), then "
            "the same submit continues it, or take another RUN_ID"
        )
    if ok and same:
        print(f"{cfg.run_id}: is finished, nothing to do; another RUN_ID begins a new one")
        return 0
    if ok is not None:
        print(f"{cfg.run_id}: {'finished' if ok else 'failed'} before, and starts again")
        clear(cfg, documents)
    with_sdk = run["kind"] == "TrainJob" and kubeflow.is_installed()
    print((kubeflow.create if with_sdk else kubectl.apply)(cfg, documents), end="")
    place = f" cluster.namespace={cfg.cluster.namespace}" if cfg.cluster.namespace else ""
    print("\nNext:")
    for action in ("logs", "status", "cancel"):
        print(
            f"  RUN_ID={cfg.run_id} python scripts/launch.py cluster={cfg.cluster.name}{place} "
            f"action={action}"
        )
    return 0


def cancel(cfg: DictConfig, documents: Sequence[Node]) -> int:
    """End the run so that its pods save first; then remove all that belongs to it."""
    was_there = clear(cfg, documents)
    state = "cancelled; the same submit continues it" if was_there else "nothing to cancel"
    print(f"{cfg.run_id}: {state}")
    return 0


def clear(cfg: DictConfig, documents: Sequence[Node]) -> bool:
    """Remove all of the run and wait until its pods have gone; whether it was there."""
    was_there = remove(cfg, run_of(documents))
    rest = [document for document in documents if document["kind"] not in (*RUNS, *KEPT)]
    if rest:
        answer = kubectl.call(
            cfg, "delete", "--filename=-", "--ignore-not-found", "--wait=false", documents=rest
        )
        was_there = was_there or bool(answer.strip())
    wait(cfg, lambda: len(pods_of(cfg)))
    return was_there


def remove(cfg: DictConfig, run: Node) -> bool:
    """Delete the object of the run and wait until its pods have gone; whether it was there."""
    if kubectl.get(cfg, address(run)) is None:
        return False

    def left() -> int:
        pods = [pod for pod in pods_of(cfg) if is_training(cfg, pod)]
        return len(pods) or int(kubectl.get(cfg, address(run)) is not None)

    if any(pod["status"].get("phase") == "Running" for pod in pods_of(cfg)):
        print(f"{cfg.run_id}: its pods have {cfg.cluster.grace_s} seconds to save", flush=True)
    kubectl.call(
        cfg, "delete", address(run), "--cascade=foreground", "--ignore-not-found", "--wait=false"
    )
    wait(cfg, left)
    return True


def wait(cfg: DictConfig, left: Callable[[], int]) -> None:
    """Wait until nothing is left, and say how many pods there are when that changes."""
    until, before = time.monotonic() + cfg.cluster.grace_s + LATE_S, 0
    while number := left():
        if number != before:
            print(f"{cfg.run_id}: waits for {number} pod{'s' * (number > 1)} to end", flush=True)
        before = number
        if time.monotonic() > until:
            raise RunError(
                f"{cfg.run_id}: {number} left after {cfg.cluster.grace_s + LATE_S} seconds; is a "
                "node lost? Look at action=status, and cancel again"
            )
        time.sleep(POLL_S)


def applied(there: Node | None) -> Any:
    """The specification that was submitted, as kubectl noted it; None if it did not."""
    annotations = (there or {}).get("metadata", {}).get("annotations", {})
    note = annotations.get("kubectl.kubernetes.io/last-applied-configuration", "{}")
    return json.loads(note).get("spec")


ACTIONS = {"check": check, "submit": submit, "logs": logs, "status": status, "cancel": cancel}
