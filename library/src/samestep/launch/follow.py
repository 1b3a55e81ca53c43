"""Follow a run in a Kubernetes cluster: the logs of all its pods, and the state of each."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from omegaconf import DictConfig

from samestep.launch import kubectl
from samestep.launch.explain import explain, explain_pod
from samestep.launch.poll import poll
from samestep.launch.render import Manifest
from samestep.ranks.process import EXIT_LOST_READER, has_lost_reader

EVENTS_EVERY = 10  # polls; events say why pods are missing or do not start
LAST_LINES_S = 60  # seconds that the last lines of an ended run may take to arrive
LATE_S = 5  # seconds after the end of a log in which the cluster learns that its container ended

REJECTED = re.compile("FailedCreate|CreationFailed")
"""Reasons of events of controllers that cannot create their Jobs or pods."""
NOT_STARTED = re.compile("Failed(Mount|AttachVolume|MapVolume|CreatePodSandBox)")
"""Reasons of events of pods whose containers cannot be created."""


@dataclass
class Stream:
    """A ``kubectl logs --follow`` that prints the log of one container to our stdout."""

    process: subprocess.Popen[bytes]
    has_ended: bool  # whether the container had ended when it was started
    alive: float = 0  # when it was last seen to run
    ended: float = 0  # when it was first seen to have ended


def logs(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print the logs of all pods, also of pods that start later, until the run ends."""
    address = kubectl.build_resource_name(kubectl.find_owner(manifests))
    stdout = os.fstat(sys.stdout.fileno())
    streams: dict[str, Stream] = {}
    printed: set[str] = set()
    warnings: list[Manifest] = []
    try:
        # In this order: no pod can start between the end of the run and the list of its pods.
        answers = poll(lambda: (kubectl.get(cfg, address), kubectl.get_pods(cfg)))
        for number, (run, pods) in enumerate(answers):
            follow_containers(cfg, pods, streams)
            if run is None or kubectl.find_outcome(run) is not None:
                break
            if has_lost_reader(stdout):
                return EXIT_LOST_READER
            if number % EVENTS_EVERY == 0:
                warnings = kubectl.get_warnings(cfg, run)
            for line in explain_run(cfg, run, pods, warnings):
                if line not in printed:
                    print(line, file=sys.stderr, flush=True)
                    printed.add(line)
        if run is None and not streams:
            raise kubectl.build_missing_error(cfg)
        for stream in streams.values():
            with suppress(subprocess.TimeoutExpired):
                stream.process.wait(LAST_LINES_S)
    finally:
        for stream in streams.values():
            stream.process.terminate()
            stream.process.wait()
    print(f"{cfg.run_id}: {describe_run(run, pods)}", file=sys.stderr)
    return 0 if kubectl.find_outcome(run) else 1


def follow_containers(
    cfg: DictConfig, pods: Sequence[Manifest], streams: dict[str, Stream]
) -> None:
    """Start a stream for each container without one, and for each whose stream was cut.

    ``streams`` has those that were started, by pod, container and number of restarts.
    """
    now = time.monotonic()
    started = [
        (pod, container)
        for pod in pods
        # The log of an etcd beside them does not end with the run.
        if kubectl.is_training_pod(cfg, pod)
        for container in pod.get("status", {}).get("containerStatuses", ())
        if {"running", "terminated"} & container.get("state", {}).keys()
    ]
    for pod, container in started:
        name = container["name"]
        key = f"{pod['metadata']['uid']} {name} {container.get('restartCount', 0)}"
        has_ended = "terminated" in container["state"]
        options = [pod["metadata"]["name"], f"--container={name}", "--follow", "--prefix"]
        if old := streams.get(key):
            if old.process.poll() is None:
                old.alive = now
                continue
            old.ended = old.ended or now
            # A proxy has cut it, if the container runs on, or if kubectl says so.
            is_late = not has_ended and now - old.ended < LATE_S
            if is_late or old.has_ended or (has_ended and not old.process.returncode):
                continue
            if old.alive:  # otherwise perhaps nothing was printed
                options.append(f"--since={math.ceil(now - old.alive) + 1}s")
        process = subprocess.Popen(
            kubectl.build_command(cfg, "logs", *options),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        streams[key] = Stream(process, has_ended)


def status(cfg: DictConfig, manifests: Sequence[Manifest]) -> int:
    """Print the state of the run, its pods, why they do not run, and their last lines."""
    manifest = kubectl.find_owner(manifests)
    run = kubectl.get(cfg, kubectl.build_resource_name(manifest))
    pods = kubectl.get_pods(cfg)
    if run is None and not pods:
        raise kubectl.build_missing_error(cfg)
    print(f"{manifest['kind']} {cfg.run_id}: {describe_run(run, pods)}")
    warnings = kubectl.get_warnings(cfg, run) if run else []
    for line in explain_run(cfg, run, pods, warnings):
        print(line)
    if pods:
        selected = kubectl.select_pods(cfg)
        print(kubectl.call(cfg, "get", "pods", selected), end="")
        options = ("--all-containers", "--prefix", "--tail=1", "--ignore-errors")
        for line in kubectl.call(cfg, "logs", selected, *options).splitlines():
            if line.startswith("["):  # pods that have not started have errors instead
                print(line)
    return 0


def describe_run(run: Manifest | None, pods: Sequence[Manifest]) -> str:
    """Describe the state of a run by its last condition, or by the pods that it has."""
    if run is None:
        return "was removed before it ended"
    if "deletionTimestamp" in run["metadata"]:
        return "is being cancelled"
    conditions = run.get("status", {}).get("conditions", ())
    true = [condition for condition in conditions if condition["status"] == "True"]
    ends = [condition for condition in true if condition["type"] in kubectl.OUTCOMES]
    if not true:
        phases = {pod.get("status", {}).get("phase") for pod in pods}
        is_pending = phases.isdisjoint({"Running", "Succeeded"})
        return "is pending: none of its pods runs" if is_pending else "runs"
    last = ends[0] if ends else true[-1]
    reason = ": ".join(filter(None, [last.get("reason"), last.get("message")]))
    return f"{last['type']} ({reason})" if reason else str(last["type"])


def explain_run(
    cfg: DictConfig, run: Manifest | None, pods: Sequence[Manifest], warnings: Sequence[Manifest]
) -> list[str]:
    """Explain why there are no pods, or fewer than there should be, and what each waits for."""
    lines = []
    spec = (run or {}).get("spec", {})
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):  # of a PyTorchJob
        lines.append(f"{cfg.run_id}: waits in the queue")
    if (run or {}).get("kind") == "PyTorchJob" and kubectl.find_outcome(run) is False:
        # Whatever its cleanPodPolicy says: the operator only looks at it when the job has failed
        # already, and it removes the pods of too many restarts before.
        lines.append(
            f"{cfg.run_id}: the training operator removes the pods of a failed run, with their "
            f"logs; the run has left its own in {cfg.run_root}/{cfg.run_id}/logs on the volume"
        )
    # The run itself, the Job in a JobSet, and the ReplicaSet of etcd.
    owner = re.compile(rf"{re.escape(cfg.run_id)}(-node-\d+|-etcd-\w+)?")
    messages: dict[str, list[str]] = {}
    for event in warnings:
        about, reason = event["involvedObject"], event.get("reason", "")
        name, message = about.get("name", ""), " ".join(event.get("message", "").split())
        if about.get("kind") == "Pod" and NOT_STARTED.match(reason):
            messages.setdefault(name, []).append(message)
        elif about.get("kind") != "Pod" and owner.fullmatch(name) and REJECTED.search(reason):
            what = "Jobs" if about.get("kind") in ("JobSet", "TrainJob") else "pods"
            lines.append(f"{cfg.run_id}: {what} are rejected; {explain(message)}")
    for pod in pods:
        name = pod["metadata"]["name"]
        if reason := explain_pod(pod, messages.get(name, ())):
            lines.append(f"{name}: {reason}")
    return list(dict.fromkeys(lines))
