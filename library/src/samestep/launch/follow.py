"""Follow a run in a Kubernetes cluster: the logs of all its pods, and a table of them."""

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from samestep.errors import RunError
from samestep.launch import kubectl, kubectl_errors
from samestep.launch.render import Document
from samestep.ranks.failure import EXIT_SIGTERM
from samestep.ranks.process import EXIT_LOST_READER, has_lost_reader

POLL_S = 1.0
EVENTS_EVERY = 10  # polls; events say why pods are missing or do not start
RETRIES = 60  # polls without an answer before we give up; a cluster may be upgraded
LAST_LINES_S = 60  # seconds that the last lines of an ended run may take to arrive

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")  # RFC 3339
REFUSED = re.compile("FailedCreate|CreationFailed")
"""Reasons of events of controllers that cannot create their Jobs or pods."""
NOT_STARTED = re.compile("Failed(Mount|AttachVolume|MapVolume|CreatePodSandBox)")
"""Reasons of events of pods whose containers cannot be created."""


def logs(cfg: DictConfig, documents: Sequence[Document]) -> int:
    """Print the logs of all pods, also of pods that start later, until the run ends.

    Returns:
        0 if the run succeeded, 1 if not, 141 if the reader of the logs went away before.
    """
    streams: dict[str, Stream] = {}
    stdout = os.fstat(sys.stdout.fileno())
    address = kubectl.build_address(kubectl.find_run(documents))
    printed: set[str] = set()
    warnings: list[Document] = []
    for poll in itertools.count():
        run, pods = get_run_and_pods(cfg, address, retries=RETRIES if streams else 0)
        start_missing(cfg, pods, streams)
        if run is None or kubectl.find_outcome(run) is not None:
            break

        if has_lost_reader(stdout):
            return EXIT_LOST_READER

        if poll % EVENTS_EVERY == 0:
            warnings = kubectl.get_warnings(cfg, run)
        lines = [*explain_pods(pods, warnings), *explain_missing_pods(cfg, run, warnings)]
        print_new(lines, printed)
        time.sleep(POLL_S)

    if run is None and not streams:
        raise kubectl.build_missing_error(cfg)
    for stream in streams.values():
        stream.join(LAST_LINES_S)
    print(f"{cfg.run_id}: {describe_run(run)}", file=sys.stderr)
    return 0 if kubectl.find_outcome(run) else 1


def print_new(lines: Sequence[str], printed: set[str]) -> None:
    """Print the lines that were not printed before, to stderr."""
    for line in lines:
        if line not in printed:
            print(line, file=sys.stderr, flush=True)
            printed.add(line)


def status(cfg: DictConfig, documents: Sequence[Document]) -> int:
    """Print the state of the run, and a table of its pods."""
    document = kubectl.find_run(documents)
    run = kubectl.get(cfg, kubectl.build_address(document))
    pods = kubectl.get_pods(cfg)
    if run is None and not pods:
        raise kubectl.build_missing_error(cfg)
    print(f"{document['kind']} {cfg.run_id}: {describe_run(run, pods)}")
    warnings = kubectl.get_warnings(cfg, run) if run else []
    for line in explain_missing_pods(cfg, run, warnings) if run else ():
        print(line)
    print_table(cfg, pods, warnings)
    return 0


class Stream(threading.Thread):
    """Prints the log of a container, each line with the name of its pod, until the log ends.

    It continues ``before``, a stream that was cut, and does not print its lines again.
    """

    def __init__(
        self, cfg: DictConfig, pod: Document, container: Document, before: "Stream | None" = None
    ) -> None:
        super().__init__(daemon=True)
        pod_name, container_name = pod["metadata"]["name"], container["name"]
        short_name = pod_name.removeprefix(f"{cfg.run_id}-")
        if len(pod["spec"]["containers"]) > 1:
            short_name += f"/{container_name}"
        self.prefix = f"[{short_name}] "
        self.is_continued = before is not None
        self.since: str = before.last_time if before else ""
        self.last_time: str = self.since
        self.is_complete = "terminated" in container["state"]
        """Whether the log ends because the container has ended, and not because a proxy cut it."""
        self.command = kubectl.build_command(
            cfg, "logs", pod_name, f"--container={container_name}", "--follow", "--timestamps"
        )
        if self.since:
            self.command.append(f"--since-time={self.since}")
        self.start()

    def run(self) -> None:
        """Print lines until kubectl ends."""
        with subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout
            is_old = self.is_continued
            for line in map(str.rstrip, process.stdout):
                line_time, _, text = line.partition(" ")
                if TIMESTAMP.fullmatch(line_time):
                    # --since-time counts in whole seconds, so some lines come a second time.
                    is_old = line_time <= self.since
                    self.last_time = max(line_time, self.since)
                else:
                    # A part of the line before, or an error of kubelet, which has no time.
                    text = line
                if not is_old:
                    sys.stdout.write(f"{self.prefix}{text}\n")
                    sys.stdout.flush()


def start_missing(cfg: DictConfig, pods: Sequence[Document], streams: dict[str, Stream]) -> None:
    """Start a stream for each container without one, and for each whose stream was cut.

    ``streams`` has those that were started, by pod, container and number of restarts.
    """
    for pod, container in list_started_containers(pods):
        restarts = container.get("restartCount", 0)
        key = f"{pod['metadata']['uid']} {container['name']} {restarts}"
        old = streams.get(key)
        if old is None:
            streams[key] = Stream(cfg, pod, container)
        elif not old.is_alive() and not old.is_complete:
            streams[key] = Stream(cfg, pod, container, before=old)


def get_run_and_pods(
    cfg: DictConfig, address: str, retries: int
) -> tuple[Document | None, list[Document]]:
    """Get the object of the run, None if there is none, and its pods.

    Raises:
        RunError: if kubectl fails more than ``retries`` times, one poll apart.
    """
    failures = 0
    while True:
        try:
            # In this order: no pod can start between the end of the run and the list of its pods.
            run = kubectl.get(cfg, address)
            return run, kubectl.get_pods(cfg)
        except RunError:
            failures += 1
            if failures > retries:
                raise
        time.sleep(POLL_S)


def list_started_containers(pods: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    """List pod and container for each container that may have a log."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if {"running", "terminated"} & container.get("state", {}).keys():
                yield pod, container


def describe_run(run: Document | None, pods: Sequence[Document] | None = None) -> str:
    """Describe the state of the run by its last condition, or by the pods that it has."""
    if run is None:
        return "was removed before it ended"
    if "deletionTimestamp" in run["metadata"]:
        return "is being cancelled"
    conditions = run.get("status", {}).get("conditions", ())
    true = [condition for condition in conditions if condition["status"] == "True"]
    ends = [condition for condition in true if condition["type"] in kubectl.OUTCOMES]
    if not true:
        phases = {pod.get("status", {}).get("phase") for pod in pods or ()}
        is_pending = pods is not None and phases.isdisjoint({"Running", "Succeeded"})
        return "is pending: none of its pods runs" if is_pending else "runs"
    last = ends[0] if ends else true[-1]
    reason = ": ".join(filter(None, [last.get("reason"), last.get("message")]))
    return f"{last['type']} ({reason})" if reason else str(last["type"])


def explain_pods(pods: Sequence[Document], warnings: Sequence[Document]) -> Iterator[str]:
    """Explain why pods do not run, and how they failed."""
    for pod in pods:
        if reason := explain_pod(pod, warnings):
            yield f"{pod['metadata']['name']}: {reason}"


def explain_pod(pod: Document, warnings: Sequence[Document]) -> str:
    """Explain why a pod does not run, or how it failed; nothing if all is well."""
    messages = [
        event.get("message", "")
        for event in warnings
        if event["involvedObject"].get("kind") == "Pod"
        and event["involvedObject"].get("name") == pod["metadata"]["name"]
        and NOT_STARTED.match(event.get("reason", ""))
    ]
    return kubectl_errors.explain_waiting(pod, messages) or kubectl_errors.explain_exit(pod)


def explain_missing_pods(
    cfg: DictConfig, run: Document, warnings: Sequence[Document]
) -> Iterator[str]:
    """Explain why there are no pods, or fewer than there should be; each reason once."""
    spec = run.get("spec", {})
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):  # of a PyTorchJob
        yield f"{cfg.run_id}: waits in the queue"
    if run.get("kind") == "PyTorchJob" and kubectl.find_outcome(run) is False:
        # Whatever its cleanPodPolicy says: the operator only looks at it when the job has failed
        # already, and it removes the pods of too many restarts before.
        yield (
            f"{cfg.run_id}: the training operator removes the pods of a failed run, with their "
            f"logs; the run has left its own in {cfg.run_root}/{cfg.run_id}/logs on the volume"
        )
    # The run itself, the Job in a JobSet, and the ReplicaSet of etcd.
    owner = re.compile(rf"{re.escape(cfg.run_id)}(-node-\d+|-etcd-\w+)?")
    lines: dict[str, None] = {}  # in order, each once
    for event in warnings:
        about = event["involvedObject"]
        is_ours = about.get("kind") != "Pod" and owner.fullmatch(about.get("name", ""))
        if is_ours and REFUSED.search(event.get("reason", "")):
            what = "Jobs" if about.get("kind") in ("JobSet", "TrainJob") else "pods"
            reason = kubectl_errors.explain_event(event.get("message", ""))
            lines[f"{cfg.run_id}: {what} are refused; {reason}"] = None
    yield from lines


def print_table(cfg: DictConfig, pods: Sequence[Document], warnings: Sequence[Document]) -> None:
    """Print a row for each pod."""
    started = [pod["metadata"]["name"] for pod, _ in list_started_containers(pods)]
    with ThreadPoolExecutor(8) as pool:
        lines = pool.map(lambda name: get_last_line(cfg, name), started)
        last_lines = dict(zip(started, lines, strict=True))

    table = Table("pod", "node", "state", "restarts", "age", "last line", box=None, pad_edge=False)
    for pod in pods:
        name = pod["metadata"]["name"]
        containers = pod.get("status", {}).get("containerStatuses", ())
        restarts = sum(container.get("restartCount", 0) for container in containers)
        table.add_row(
            name, pod["spec"].get("nodeName", "-"), describe_pod(pod, warnings), str(restarts),
            format_age(pod), last_lines.get(name, "-"),
        )  # fmt: skip

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000  # a log or another program wants whole lines
    console.print(table)


def describe_pod(pod: Document, warnings: Sequence[Document]) -> str:
    """Describe the state of a pod: its phase, and the reason if something is wrong."""
    phase = str(pod.get("status", {}).get("phase", "-"))
    if "deletionTimestamp" in pod["metadata"]:
        phase = "Terminating"
    reason = explain_pod(pod, warnings)
    if phase == "Failed" and reason.endswith(f"({EXIT_SIGTERM})"):
        return reason  # Kubernetes calls it a failure, and it is none
    return f"{phase}: {reason}" if reason else phase


def get_last_line(cfg: DictConfig, pod_name: str) -> str:
    """Get the last line that a pod has printed."""
    try:
        lines = kubectl.call(cfg, "logs", pod_name, "--tail=1", "--all-containers").split("\n")
    except RunError:
        return "-"  # the pod was removed in the meantime
    return next(filter(None, reversed(lines)), "-")


def format_age(pod: Document) -> str:
    """Format the age of a pod, such as 5m or 3h."""
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    seconds = int((datetime.now(UTC) - created).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
