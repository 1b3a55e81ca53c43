"""Follow a run in a Kubernetes cluster: the logs of all its pods, and the state of each."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from omegaconf import DictConfig

from samestep.errors import RunError
from samestep.launch import kubectl
from samestep.launch.explain import explain, explain_lost, explain_pod
from samestep.launch.poll import poll, print_once
from samestep.launch.render import Manifest
from samestep.ranks.failure import EXIT_SIGTERM
from samestep.ranks.process import EXIT_LOST_READER, has_lost_reader

NOTE = "Note: a checkpoint takes"
"""What a run says that saves too slowly; see ``samestep.plugins.save_time``."""
EVENTS_EVERY = 10  # polls; events say why pods are missing or do not start
LAST_LINES_S = 60  # seconds that the last lines of an ended run may take to arrive
NOTED_LINES = 5000  # of a log, in which status looks for a note
LATE_S = 5  # seconds after the end of a log in which the cluster learns that its container ended

REJECTED = re.compile("FailedCreate|CreationFailed")
"""Reasons of events of controllers that cannot create their Jobs or pods."""
NOT_STARTED = re.compile("Failed(Mount|AttachVolume|MapVolume|CreatePodSandBox)")
"""Reasons of events of pods whose containers cannot be created."""
CREATES = {"JobSet": "Jobs", "TrainJob": "Jobs"}
"""What a kind of object creates; the others create pods."""


@dataclass
class Stream:
    """A ``kubectl logs --follow`` that prints the log of one container to our stdout."""

    process: subprocess.Popen[bytes]
    has_ended: bool  # whether the container had ended when it was started
    alive: float = 0  # when it was last seen to run
    ended: float = math.inf  # when it was first seen to have ended

    def check_cut(self, *, has_ended: bool) -> bool:
        """Note whether the stream runs; return whether it ended before the log, as by a proxy.

        ``has_ended`` says whether the container has ended by now.
        """
        now = time.monotonic()
        if self.process.poll() is None:
            self.alive = now
            return False
        # The container had ended before the stream began, so its log was complete.
        if self.has_ended:
            return False
        if has_ended:
            return self.process.returncode != 0
        # The cluster learns that a container has ended somewhat later than its log ends.
        self.ended = min(self.ended, now)
        return now - self.ended >= LATE_S


def logs(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print the logs of all pods, also of pods that start later, until the run ends."""
    stdout = os.fstat(sys.stdout.fileno())
    streams: dict[str, Stream] = {}
    printed: set[str] = set()
    warnings: list[Manifest] = []
    try:
        # In this order: no pod can start between the end of the run and the list of its pods.
        answers = poll(lambda: (kubectl.get_run(cfg, manifests), kubectl.get_pods(cfg, manifests)))
        for number, (run, pods) in enumerate(answers):
            follow_containers(cfg, pods, streams)
            if not run or kubectl.find_outcome(run) is not None:
                break
            if has_lost_reader(stdout):
                return EXIT_LOST_READER
            # A namespace may have thousands of events, so they are read less often than the pods.
            if number % EVENTS_EVERY == 0:
                warnings = kubectl.get_warnings(cfg, run)
            print_once(explain_run(cfg, run, pods, warnings), printed)
        if not run and not streams:
            raise kubectl.build_missing_error(cfg)
        wait_for_last_lines(streams)
    finally:
        for stream in streams.values():
            stream.process.terminate()
            stream.process.wait()
    print(f"{cfg.run_id}: {describe_run(run, pods)}", file=sys.stderr)
    return 0 if kubectl.find_outcome(run) else 1


def wait_for_last_lines(streams: dict[str, Stream]) -> None:
    """Wait until each stream has printed its log to the end."""
    for stream in streams.values():
        # A node that is lost sends no end of its logs.
        with suppress(subprocess.TimeoutExpired):
            stream.process.wait(LAST_LINES_S)


def follow_containers(
    cfg: DictConfig, pods: Sequence[Manifest], streams: dict[str, Stream]
) -> None:
    """Start a stream for each container without one, and for each whose stream was cut.

    ``streams`` has those that were started, by pod, container and number of restarts.
    """
    for pod, container in find_started_containers(cfg, pods):
        restarts = container.get("restartCount", 0)
        # A pod of the same name may replace this one, so the uid tells them apart.
        key = f"{pod['metadata']['uid']} {container['name']} {restarts}"
        has_ended = "terminated" in container["state"]
        since = []
        if key in streams:
            stream = streams[key]
            if not stream.check_cut(has_ended=has_ended):
                continue
            # A stream that was never seen alive has perhaps printed nothing.
            if stream.alive:
                # Some lines are printed twice: rather that than one too few.
                seconds = math.ceil(time.monotonic() - stream.alive) + 1
                since = [f"--since={seconds}s"]
        process = subprocess.Popen(
            kubectl.build_command(
                cfg,
                "logs",
                pod["metadata"]["name"],
                f"--container={container['name']}",
                "--follow",
                "--prefix",
                *since,
            ),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        streams[key] = Stream(process, has_ended)


def find_started_containers(
    cfg: DictConfig, pods: Sequence[Manifest]
) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each container that trains, or has trained, and its pod before it."""
    for pod in pods:
        # The log of an etcd beside them does not end with the run.
        if not kubectl.is_training_pod(cfg, pod):
            continue
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if {"running", "terminated"} & container.get("state", {}).keys():
                yield pod, container


def status(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print the state of the run, its pods, why they do not run, and their last lines."""
    manifest = kubectl.find_owner(manifests)
    run = kubectl.get_run(cfg, manifests)
    pods = kubectl.get_pods(cfg, manifests)
    if not run and not pods:
        raise kubectl.build_missing_error(cfg)
    print(f"{manifest['kind']} {cfg.run_id}: {describe_run(run, pods)}")
    warnings = kubectl.get_warnings(cfg, run) if run else []
    for line in explain_run(cfg, run, pods, warnings):
        print(line)
    if pods:
        print_pods(cfg, manifests)
        print_note(cfg, pods)
    return 0


def print_note(cfg: DictConfig, pods: Sequence[Manifest]) -> None:
    """Print what the run has noted about the time of its saves; rank zero's pod has it."""
    names = [pod["metadata"]["name"] for pod in pods if kubectl.is_training_pod(cfg, pod)]
    # A pod that has not started has no log.
    with suppress(RunError):
        for name in names[:1]:
            log = kubectl.call(cfg, "logs", name, f"--tail={NOTED_LINES}")
            for line in log.splitlines():
                if NOTE in line:
                    print(f"{cfg.run_id}: {line[line.index(NOTE) :]}")


def print_pods(cfg: DictConfig, manifests: Sequence[Manifest]) -> None:
    """Print kubectl's table of the pods, and the last line of each."""
    selected = kubectl.select(manifests)
    print(kubectl.call(cfg, "get", "pods", selected), end="")
    options = ("--all-containers", "--prefix", "--tail=1", "--ignore-errors")
    for line in kubectl.call(cfg, "logs", selected, *options).splitlines():
        # Pods that have not started have error messages here, without a prefix.
        if line.startswith("["):
            print(line)


def describe_run(run: Manifest, pods: Sequence[Manifest]) -> str:
    """Describe the state of a run by its last condition, or by the pods that it has."""
    if not run:
        return "was removed before it ended"
    if "deletionTimestamp" in run["metadata"]:
        return "is being cancelled"
    condition = kubectl.find_condition(run)
    if condition:
        return describe_condition(condition)
    lost = [pod["metadata"]["name"] for pod in pods if explain_lost(pod)]
    if lost:
        return f"waits for {', '.join(lost)}, whose node does not answer"
    if kubectl.find_phases(pods).isdisjoint({"Running", "Succeeded"}):
        return "is pending: none of its pods runs"
    return "runs"


def describe_condition(condition: Manifest) -> str:
    """Describe a condition: ``Failed (BackoffLimitExceeded: Job has reached ...)``."""
    reason = ": ".join(filter(None, [condition.get("reason"), condition.get("message")]))
    if not reason:
        return str(condition["type"])
    return f"{condition['type']} ({reason})"


def explain_run(
    cfg: DictConfig, run: Manifest, pods: Sequence[Manifest], warnings: Sequence[Manifest]
) -> list[str]:
    """Explain why there are no pods, or fewer than there should be, and what each waits for."""
    lines = [
        *explain_owner(cfg, run, warnings),
        *explain_uncounted(cfg, run, pods),
        *explain_rejected(cfg, warnings),
    ]
    messages: dict[str, list[str]] = {}
    for event in warnings:
        about = event["involvedObject"]
        if about.get("kind") == "Pod" and NOT_STARTED.match(event.get("reason", "")):
            messages.setdefault(about.get("name", ""), []).append(read_message(event))
    for pod in pods:
        name = pod["metadata"]["name"]
        reason = explain_pod(pod, messages.get(name, ()))
        if reason:
            lines.append(f"{name}: {reason}")
    # A controller repeats its events, with other names of pods in them.
    return list(dict.fromkeys(lines))


def explain_owner(cfg: DictConfig, run: Manifest, warnings: Sequence[Manifest]) -> Iterator[str]:
    """Explain what the owner object of the run does to its pods."""
    spec = run.get("spec", {})
    policy = spec.get("runPolicy", {})  # of a PyTorchJob
    if spec.get("suspend") or policy.get("suspend"):
        reason = find_reason_of_queue(cfg, warnings)
        yield ": ".join(filter(None, [cfg.run_id, "waits in the queue", reason]))
    if run.get("kind") == "PyTorchJob" and kubectl.find_outcome(run) is False:
        # Whatever its cleanPodPolicy says: the operator only looks at it when the job has failed
        # already, and it removes the pods of too many restarts before.
        yield (
            f"{cfg.run_id}: the training operator removes the pods of a failed run, with their "
            f"logs; the run has left its own in {cfg.run_root}/{cfg.run_id}/logs on the volume"
        )


def find_reason_of_queue(cfg: DictConfig, warnings: Sequence[Manifest]) -> str:
    """Find what Kueue last said about the run; empty if it has said nothing."""
    # Kueue names its object for a run so: job-mine-3f2a1.
    workload = re.compile(rf"[a-z]+-{re.escape(cfg.run_id)}-\w+")
    reason = ""
    for event in warnings:
        about = event["involvedObject"]
        if about.get("kind") == "Workload" and workload.fullmatch(about.get("name", "")):
            reason = read_message(event)
    return reason


def explain_uncounted(cfg: DictConfig, run: Manifest, pods: Sequence[Manifest]) -> Iterator[str]:
    """Say how often the run has started again without a failure, which no limit counts."""
    status = run.get("status", {})
    starts = sum(map(was_disrupted, pods))
    # A JobSet removes its old pods.
    starts += status.get("restarts", 0) - status.get("restartsCountTowardsMax", 0)
    if starts > 0:
        yield (
            f"{cfg.run_id}: pods were evicted, preempted or stopped {starts} times, and replaced; "
            "it fails only if they save no new checkpoint"
        )


def was_disrupted(pod: Manifest) -> bool:
    """Whether a pod has ended because it was evicted, preempted or stopped."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return False
    if "DisruptionTarget" in [condition["type"] for condition in status.get("conditions", ())]:
        return True
    exit_codes = [
        container.get("state", {}).get("terminated", {}).get("exitCode")
        for container in status.get("containerStatuses", ())
    ]
    return EXIT_SIGTERM in exit_codes


def explain_rejected(cfg: DictConfig, warnings: Sequence[Manifest]) -> Iterator[str]:
    """Explain why controllers cannot create the Jobs or the pods of the run."""
    # The run itself, the Job in a JobSet, and the ReplicaSet of etcd.
    owner = re.compile(rf"{re.escape(cfg.run_id)}(-node-\d+|-etcd-\w+)?")
    for event in warnings:
        about = event["involvedObject"]
        kind = about.get("kind")
        if kind == "Pod" or not owner.fullmatch(about.get("name", "")):
            continue
        if REJECTED.search(event.get("reason", "")):
            created = CREATES.get(kind, "pods")
            yield f"{cfg.run_id}: {created} are rejected; {explain(read_message(event))}"


def read_message(event: Manifest) -> str:
    """Return the message of an event as one line."""
    return " ".join(event.get("message", "").split())
