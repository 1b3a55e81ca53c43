"""Check, submit and cancel a run in a Kubernetes cluster, by kubectl."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import kubectl, kubeflow, volume
from samestep.launch.follow import POLL_S, logs, status
from samestep.launch.kubectl import RUNS, build_address, find_outcome, find_run, get_pods
from samestep.launch.kubectl_errors import MAKE_CLAIM
from samestep.launch.render import Document

KEPT_KINDS = (volume.CLAIM,)  # these objects outlive a run that is cancelled
ANSWER_S = 5  # seconds in which a cluster must answer; otherwise the check goes on without it
EXTRA_S = 60  # seconds that pods may take to end, beyond their grace period


def check(cfg: DictConfig, documents: Sequence[Document]) -> int:
    """Report that the checks found no mistakes; then ask the cluster, if there is one."""
    kinds = ", ".join(document["kind"] for document in documents)
    print(
        f"{cfg.run_id}: no mistakes in {kinds}: schemas, rules of the servers, Pod Security "
        "Standard (restricted), names, images, secrets"
    )
    try:
        kubectl.call(cfg, "get", "--raw=/version", timeout_s=ANSWER_S)
    except RunError as error:
        print(f"{cfg.run_id}: no cluster was asked; {error}")
        return 0
    documents = volume.leave_existing_claim(cfg, documents)
    try:
        kubectl.call(
            cfg, "apply", "--dry-run=server", "--validate=strict", "--filename=-",
            documents=documents,
        )  # fmt: skip
    except RunError as error:
        # A dry run creates nothing, so a later document may refer to an object that is missing.
        if "is not in the cluster yet" not in str(error):
            raise
        refuse_missing_claim(cfg, documents)
        kind = documents[-1]["kind"]
        print(f"{cfg.run_id}: the cluster can judge the {kind} only when it is submitted")
        return 0
    refuse_missing_claim(cfg, documents)
    print(f"{cfg.run_id}: the cluster would accept it (strict dry run of its server)")
    return 0


def refuse_missing_claim(cfg: DictConfig, documents: Sequence[Document]) -> None:
    """Raise a RunError if the pods would wait for a volume claim that nobody has created."""
    name = cfg.cluster.volume
    created = [d["metadata"]["name"] for d in documents if d["kind"] == volume.CLAIM]
    if name is None or name in created:
        return
    try:
        is_there = kubectl.get(cfg, "persistentvolumeclaims", name) is not None
    except RunError:
        return  # not everybody may read claims
    if not is_there:
        raise RunError(
            f"cluster.volume={name}: there is no such claim in the namespace; {MAKE_CLAIM}"
        )


def submit(cfg: DictConfig, documents: Sequence[Document]) -> int:
    """Start the run, or start it again after it ended; change nothing while it runs."""
    document = find_run(documents)
    run = kubectl.get(cfg, build_address(document))
    if run is not None:
        is_same = read_submitted_spec(run) == json.loads(json.dumps(document["spec"]))
        refuse_to_change(cfg, run, is_same)
        outcome = find_outcome(run)
        if outcome and is_same:
            print(f"{cfg.run_id}: is finished, nothing to do; another RUN_ID begins a new run")
            return 0
        if outcome is not None:
            print(f"{cfg.run_id}: {'finished' if outcome else 'failed'} before, and starts again")
            remove_all(cfg, documents)

    documents = volume.leave_existing_claim(cfg, documents)
    if document["kind"] == "TrainJob" and kubeflow.is_installed():
        print(kubeflow.create(cfg, documents), end="")
    else:
        print(kubectl.apply(cfg, documents), end="")
    make_owner(cfg, documents)
    return 0


def make_owner(cfg: DictConfig, documents: Sequence[Document]) -> None:
    """Make the object of the run the owner of the others: when it goes, the cluster removes them.

    They are created before, because the pods need them. A later ``kubectl apply`` keeps the
    reference, which is not in the documents. It does not block the deletion of the run: the Service
    stays while the pods save.
    """
    document = find_run(documents)
    owned = [item for item in documents if item["kind"] not in (*RUNS, *KEPT_KINDS)]
    run = kubectl.get(cfg, build_address(document))
    if not owned or run is None:
        return
    owner = {key: run[key] for key in ("apiVersion", "kind")}
    owner |= {key: run["metadata"][key] for key in ("name", "uid")}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    try:
        kubectl.call(
            cfg, "patch", "--filename=-", "--type=merge", f"--patch={patch}", documents=owned
        )
    except RunError as error:
        # The run has started all the same.
        kinds = ", ".join(item["kind"] for item in owned)
        print(f"{cfg.run_id}: {kinds} will stay when the run is removed; {error}")


def fill_volume(cfg: DictConfig, documents: Sequence[Document]) -> int:
    """Run the Job that puts data into the volume; return 0 when the data are ready, or 1."""
    run = kubectl.get(cfg, build_address(find_run(documents)))
    if find_outcome(run) is not None:
        # Somebody may have removed the files in the meantime, so the Job looks again.
        remove_all(cfg, documents)
    submit(cfg, documents)
    return logs(cfg, documents)


def cancel(cfg: DictConfig, documents: Sequence[Document]) -> int:
    """End the run so that its pods can save; then remove everything that belongs to it."""
    is_run = kubectl.get(cfg, build_address(find_run(documents))) is not None
    existed = remove_all(cfg, documents)
    if is_run:
        state = "cancelled; the same submit continues it"
    elif existed:
        state = "had ended; what it had left in the cluster is removed"
    else:
        kubectl.refuse_missing_namespace(cfg)
        state = "nothing to cancel"
    print(f"{cfg.run_id}: {state}")
    return 0


def refuse_to_change(cfg: DictConfig, run: Document, is_same: bool) -> None:
    """Refuse a submit while the run is being cancelled, or runs with another specification.

    Raises:
        RunError: with the command that helps.
    """
    if run["metadata"].get("deletionTimestamp"):
        raise RunError(f"{cfg.run_id}: is still being cancelled; wait for that (samestep status)")
    if find_outcome(run) is None and not is_same:
        raise RunError(
            f"{cfg.run_id}: runs already, with other overrides; cancel it first (samestep cancel), "
            "then this submit continues it, or choose another RUN_ID"
        )


def read_submitted_spec(run: Document) -> Any:
    """Read the specification that was submitted, which kubectl noted; None if it did not."""
    annotations = run["metadata"].get("annotations", {})
    note = annotations.get(kubeflow.SUBMITTED_ANNOTATION, "{}")
    return json.loads(note).get("spec")


def remove_all(cfg: DictConfig, documents: Sequence[Document]) -> bool:
    """Remove all objects of the run, and wait for its pods; return whether there were any."""
    existed = remove_run(cfg, find_run(documents))
    # The pods need their Service and their volume while they save, so these come afterwards.
    rest = [document for document in documents if document["kind"] not in (*RUNS, *KEPT_KINDS)]
    if rest:
        answer = kubectl.call(
            cfg, "delete", "--filename=-", "--ignore-not-found", "--wait=false", documents=rest
        )
        existed = existed or bool(answer.strip())
    # A TrainJob that is submitted again must not find the old runtime, which is about to go.
    runtimes = [build_address(item) for item in rest if item["kind"] == "TrainingRuntime"]

    def count_remaining() -> int:
        return len(get_pods(cfg)) or sum(kubectl.get(cfg, name) is not None for name in runtimes)

    wait_until_none(cfg, count_remaining)
    return existed


def remove_run(cfg: DictConfig, document: Document) -> bool:
    """Delete the object of the run, and wait for its pods; return whether there was one."""
    address = build_address(document)
    if kubectl.get(cfg, address) is None:
        return False

    def count_remaining() -> int:
        pods = [pod for pod in get_pods(cfg) if kubectl.is_training_pod(cfg, pod)]
        return len(pods) or int(kubectl.get(cfg, address) is not None)

    if any(pod["status"].get("phase") == "Running" for pod in get_pods(cfg)):
        print(f"{cfg.run_id}: its pods have {cfg.cluster.grace_s} seconds to save", flush=True)
    # In the foreground the cluster removes what a TrainJob owns before the TrainJob itself. Without
    # its TrainingRuntime Trainer's webhook then denies every change of it, also its removal.
    cascade = "background" if document["kind"] == "TrainJob" else "foreground"
    kubectl.call(
        cfg, "delete", address, f"--cascade={cascade}", "--ignore-not-found", "--wait=false"
    )
    wait_until_none(cfg, count_remaining)
    return True


def wait_until_none(cfg: DictConfig, count_remaining: Callable[[], int]) -> None:
    """Wait until nothing remains, and print the number of pods whenever it changes.

    Raises:
        RunError: if something remains after the grace period.
    """
    limit_s = cfg.cluster.grace_s + EXTRA_S
    deadline, before = time.monotonic() + limit_s, 0
    while number := count_remaining():
        if number != before:
            print(f"{cfg.run_id}: waits for {number} pod{'s' * (number > 1)} to end", flush=True)
        before = number
        if time.monotonic() > deadline:
            raise RunError(
                f"{cfg.run_id}: {number} left after {limit_s} seconds; is a node lost? Look at "
                "samestep status, and cancel again"
            )
        time.sleep(POLL_S)


ACTIONS = {"check": check, "submit": submit, "logs": logs, "status": status, "cancel": cancel}
