"""Check, submit and cancel a run in a Kubernetes cluster, by kubectl."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import creation, dry_run, kubectl, kubeflow, ownership, submissions, volume
from samestep.launch.explain import explain_lost
from samestep.launch.follow import logs, status
from samestep.launch.kubectl import RUNS, find_outcome, find_owner, get_pods, is_training_pod
from samestep.launch.poll import EXTRA_S, poll
from samestep.launch.render import Manifest

KEPT_KINDS = (volume.CLAIM,)  # these objects outlive a run that is cancelled
ANSWER_S = 5  # seconds in which a cluster must answer; otherwise the check continues without it


def check(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Ask the cluster, if there is one, whether it would accept the objects and the pods."""
    print(f"{cfg.run_id}: no errors in the configuration")
    try:
        kubectl.call(cfg, "get", "--raw=/version", timeout_s=ANSWER_S)
    except kubectl.NoAnswerError as error:
        print(f"{cfg.run_id}: no cluster was checked; {error}")
        return 0
    with dry_run.before_anything_exists():
        manifests = volume.leave_existing_claim(cfg, manifests)
        dry_run.judge(cfg, manifests, ownership.find_own(cfg, find_of_run(manifests)))
    print(f"{cfg.run_id}: the cluster would accept it (strict dry run of its server)")
    return 0


def submit(
    cfg: DictConfig, manifests: Sequence[Manifest], overrides: Sequence[str] | None = None
) -> int:
    """Start the run, or start it again after it ended; change nothing while it runs.

    Args:
        cfg: of the run.
        manifests: of all its objects.
        overrides: to remember, so that the run is found by its name; None to remember nothing.
    """
    owner = find_owner(manifests)
    with dry_run.before_anything_exists():
        existing = ownership.find_own(cfg, find_of_run(manifests))
    run = find_of_kind(existing, owner["kind"])
    outcome = find_outcome(run)
    if run:
        is_same = was_submitted(run, owner)
        reject_running(cfg, run, is_same=is_same)
        if outcome and is_same:
            print(f"{cfg.run_id}: is finished, nothing to do; another RUN_ID starts a new run")
            return 0
    with dry_run.before_anything_exists():
        manifests = volume.leave_existing_claim(cfg, manifests)
        # An ended run of this name is still complete, with its logs.
        dry_run.judge(cfg, manifests, existing)
    if overrides is not None:
        # Before there is anything: the cluster may be lost when the run has started. A folder that
        # cannot be written is reported when it has.
        with suppress(OSError):
            submissions.write(cfg.run_id, overrides)
    if outcome is not None:
        state = "finished" if outcome else "failed"
        print(f"{cfg.run_id}: {state} before, and starts again")
    is_running = run and outcome is None
    if existing and not is_running:
        # The fields of an ended Job cannot be changed, so it is created again. And what a run that
        # is gone has left would go a moment later, from under the new one.
        remove_all(cfg, manifests)
        existing = []
    creation.create_missing(cfg, manifests, existing)
    if is_running:
        print(f"{cfg.run_id}: was launched {ownership.describe_author(run)}, and stays unchanged")
    return 0


def find_of_kind(existing: Sequence[Manifest], kind: str) -> Manifest:
    """Find the first object of a kind; empty if there is none."""
    for item in existing:
        if item["kind"] == kind:
            return item
    return {}


def find_of_run(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Find the manifests of the objects that belong to one run."""
    return [item for item in manifests if item["kind"] not in KEPT_KINDS]


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
        raise RunError(
            f"{cfg.run_id}: is still being cancelled; wait for that (samestep status "
            f"{cfg.run_id} says for what it waits)"
        )
    if find_outcome(run) is None and not is_same:
        raise RunError(
            f"{cfg.run_id}: is running with other overrides, launched "
            f"{ownership.describe_author(run)}; cancel it first (samestep cancel {cfg.run_id}), "
            "then this submit resumes it, or choose another RUN_ID"
        )


def find_owned(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Find the manifests of the objects that are removed with the run."""
    return [item for item in manifests if item["kind"] not in (*RUNS, *KEPT_KINDS)]


def fill_volume(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Run the Job that puts data into the volume; return 0 when the data are ready, or 1."""
    if find_outcome(kubectl.get_run(cfg, manifests)) is not None:
        # The files may have been removed in the meantime, so the Job looks again.
        remove_all(cfg, manifests)
    submit(cfg, manifests)
    return logs(cfg, manifests)


def cancel(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """End the run so that its pods can save; then remove everything that belongs to it."""
    existing = kubectl.find_existing(cfg, find_of_run(manifests))
    own = [item for item in existing if kubectl.has_identity(item, manifests)]
    pods = get_pods(cfg, manifests)
    if not own and not pods:
        # The objects of a stranger with this name stay, and so does the run on another cluster.
        for item in existing:
            raise ownership.build_foreign_error(cfg, item, manifests)
        raise kubectl.build_missing_error(cfg)
    remove_all(cfg, manifests)
    state = "had ended; its objects are removed"
    if find_of_kind(own, find_owner(manifests)["kind"]):
        state = "cancelled; the same submit resumes it"
    print(f"{cfg.run_id}: {state}")
    return 0


def remove_all(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Remove all objects of the run, and wait for its pods."""
    run = kubectl.get_run(cfg, manifests)
    if run:
        remove_owner(cfg, manifests, run)
    # The pods need their Service and their volume while they save, so these come afterwards.
    owned = find_owned(manifests)
    if owned:
        # A run that is submitted again must not find an old object, which is about to go.
        options = (kubectl.select(manifests), "--ignore-not-found", f"--timeout={EXTRA_S}s")
        kubectl.call(cfg, "delete", kubectl.build_kinds(owned), *options)
    wait_until_none(cfg, manifests, lambda: len(get_pods(cfg, manifests)))


def remove_owner(cfg: DictConfig, manifests: Sequence[Manifest], run: Manifest) -> None:
    """Remove the owner object of the run, and wait until its pods have saved and ended."""
    if "Running" in kubectl.find_phases(get_pods(cfg, manifests)):
        print(f"{cfg.run_id}: its pods have {cfg.cluster.grace_s} seconds to save", flush=True)
    cascade = "foreground"
    if run["kind"] == "TrainJob":
        # In the foreground the cluster removes what a TrainJob owns before the TrainJob itself.
        # Without its TrainingRuntime Trainer's webhook then denies every change of it, also its
        # removal.
        cascade = "background"
    options = (f"--cascade={cascade}", "--ignore-not-found", "--wait=false")
    # By the labels of the run, not by its name.
    kubectl.call(cfg, "delete", kubectl.build_kind(run), kubectl.select(manifests), *options)

    def count_remaining() -> int:
        pods = get_pods(cfg, manifests)
        num_pods = sum(is_training_pod(cfg, pod) for pod in pods)
        # The owner object itself goes a moment after its last pod.
        return num_pods or int(bool(kubectl.get_run(cfg, manifests)))

    wait_until_none(cfg, manifests, count_remaining)


def wait_until_none(
    cfg: DictConfig, manifests: Sequence[Manifest], count_remaining: Callable[[], int]
) -> None:
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
    advice = f"check samestep status {cfg.run_id}, and cancel again"
    for pod in get_pods(cfg, manifests):
        lost = explain_lost(pod)
        if lost:
            advice = f"{pod['metadata']['name']}: {lost}"
    raise RunError(f"{cfg.run_id}: {before} left after {limit_s} seconds; {advice}")


ACTIONS = {
    "check": check,
    "data": fill_volume,
    "logs": logs,
    "status": status,
    "cancel": cancel,
}
