"""Follow a run in a Kubernetes cluster: the logs of all its pods, and a table of them."""

import itertools
import os
import shlex
import signal
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
from samestep.launch.kubectl_errors import Object

POLL_S = 1.0
EVENTS_EVERY = 10  # polls; events say why there are fewer pods than there should be
RETRIES = 60  # polls without an answer before we give up; a cluster may be upgraded
LAST_LINES_S = 60  # seconds that the last lines of an ended run may take to arrive
PLACE_KEYS = ("namespace", "cli", "project", "domain")
"""Keys of ``cluster`` that say where a run is, and by which command it is found there."""


def logs(cfg: DictConfig, documents: Sequence[Object]) -> int:
    """Print the logs of all pods, also of pods that start later, until the run ends.

    Returns:
        0 if the run succeeded, 1 if not, 141 if the reader of the logs went away before.
    """
    streams = Streams(cfg)
    stdout = os.fstat(sys.stdout.fileno())
    address = kubectl.build_address(kubectl.find_run(documents))
    printed: set[str] = set()
    for poll in itertools.count():
        run, pods = get_run_and_pods(cfg, address, retries=RETRIES if streams.by_key else 0)
        streams.start_missing(pods)
        if run is None or kubectl.find_outcome(run) is not None:
            break

        # samestep.ranks.process replaces a pipe that nobody reads any more by /dev/null.
        if not os.path.samestat(stdout, os.fstat(sys.stdout.fileno())):
            return 128 + signal.SIGPIPE

        problems = list(explain_pods(pods))
        if poll % EVENTS_EVERY == 0:
            problems += explain_missing_pods(cfg, run)
        for line in problems:
            if line not in printed:
                print(line, file=sys.stderr, flush=True)
                printed.add(line)
        time.sleep(POLL_S)

    if run is None and not streams.by_key:
        raise kubectl.build_missing_error(cfg)
    streams.join()
    print(f"{cfg.run_id}: {describe_run(run)}", file=sys.stderr)
    return 0 if kubectl.find_outcome(run) else 1


def status(cfg: DictConfig, documents: Sequence[Object]) -> int:
    """Print the state of the run, and a table of its pods."""
    document = kubectl.find_run(documents)
    run = kubectl.get(cfg, kubectl.build_address(document))
    pods = kubectl.get_pods(cfg)
    if run is None and not pods:
        raise kubectl.build_missing_error(cfg)
    print(f"{document['kind']} {cfg.run_id}: {describe_run(run)}")
    for line in explain_missing_pods(cfg, run) if run else ():
        print(line)
    print_table(cfg, pods)
    return 0


def print_next_commands(cfg: DictConfig) -> None:
    """Print the commands that follow, cancel and describe a run that was submitted."""
    words = [f"cluster={cfg.cluster.name}"]
    for key in PLACE_KEYS:
        if key in cfg.cluster and cfg.cluster[key] is not None:
            words.append(shlex.quote(f"cluster.{key}={cfg.cluster[key]}"))
    print("\nNext:")
    for action in ("logs", "status", "cancel"):
        line = f"python scripts/launch.py {' '.join(words)} action={action}"
        print(f"  RUN_ID={cfg.run_id} {line}", flush=True)


class Stream(threading.Thread):
    """Prints the log of a container, each line with the name of its pod, until the log ends.

    Args:
        since: time of the last line that was printed before.
    """

    def __init__(self, cfg: DictConfig, pod: Object, container: Object, since: str = "") -> None:
        super().__init__(daemon=True)
        pod_name, container_name = pod["metadata"]["name"], container["name"]
        short_name = pod_name.removeprefix(f"{cfg.run_id}-")
        if len(pod["spec"]["containers"]) > 1:
            short_name += f"/{container_name}"
        self.prefix = f"[{short_name}] "
        self.since = since
        self.last_time = since
        self.is_complete = "terminated" in container["state"]
        """Whether the log ends because the container has ended, and not because a proxy cut it."""
        self.command = kubectl.build_command(
            cfg, "logs", pod_name, f"--container={container_name}", "--follow", "--timestamps"
        )
        if since:
            self.command.append(f"--since-time={since}")
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
            for line in process.stdout:
                line_time, _, text = line.partition(" ")
                # --since-time counts in whole seconds, so some lines come a second time.
                if line_time > self.since:
                    sys.stdout.write(self.prefix + text)
                    sys.stdout.flush()
                    self.last_time = line_time


class Streams:
    """The streams of all containers of a run, by pod, container and number of restarts."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.by_key: dict[str, Stream] = {}

    def start_missing(self, pods: Sequence[Object]) -> None:
        """Start a stream for each container without one, and for each whose stream was cut."""
        for pod, container in list_started_containers(pods):
            restarts = container.get("restartCount", 0)
            key = f"{pod['metadata']['uid']} {container['name']} {restarts}"
            old = self.by_key.get(key)
            if old is None:
                self.by_key[key] = Stream(self.cfg, pod, container)
            elif not old.is_alive() and not old.is_complete:
                self.by_key[key] = Stream(self.cfg, pod, container, since=old.last_time)

    def join(self) -> None:
        """Wait until each stream has printed its last line."""
        for stream in self.by_key.values():
            stream.join(LAST_LINES_S)


def get_run_and_pods(
    cfg: DictConfig, address: str, retries: int
) -> tuple[Object | None, list[Object]]:
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


def list_started_containers(pods: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """List pod and container for each container that may have a log."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if {"running", "terminated"} & container.get("state", {}).keys():
                yield pod, container


def describe_run(run: Object | None) -> str:
    """Describe the state of the run by its last condition."""
    if run is None:
        return "was removed before it ended"
    if "deletionTimestamp" in run["metadata"]:
        return "is being cancelled"
    conditions = run.get("status", {}).get("conditions", ())
    true = [condition for condition in conditions if condition["status"] == "True"]
    ends = [condition for condition in true if condition["type"] in kubectl.OUTCOMES]
    if not true:
        return "runs"
    last = ends[0] if ends else true[-1]
    reason = ": ".join(filter(None, [last.get("reason"), last.get("message")]))
    return f"{last['type']} ({reason})" if reason else str(last["type"])


def explain_pods(pods: Sequence[Object]) -> Iterator[str]:
    """Explain why pods do not run, and how they failed."""
    for pod in pods:
        reason = kubectl_errors.explain_waiting(pod) or kubectl_errors.explain_exit(pod)
        if reason:
            yield f"{pod['metadata']['name']}: {reason}"


def explain_missing_pods(cfg: DictConfig, run: Object) -> Iterator[str]:
    """Explain why there are no pods, or fewer than there should be."""
    if run.get("spec", {}).get("suspend"):
        yield f"{cfg.run_id}: waits in the queue"
    try:
        events = kubectl.get(cfg, "events", "--field-selector=reason=FailedCreate")
    except RunError:
        return  # not everybody may read events
    for event in (events or {"items": []})["items"]:
        name = str(event.get("involvedObject", {}).get("name", ""))
        event_time = event.get("lastTimestamp") or event.get("eventTime") or ""
        if name.startswith(cfg.run_id) and event_time >= run["metadata"]["creationTimestamp"]:
            reason = kubectl_errors.explain_error(event.get("message", ""))
            yield f"{cfg.run_id}: pods are refused; {reason}"


def print_table(cfg: DictConfig, pods: Sequence[Object]) -> None:
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
            name, pod["spec"].get("nodeName", "-"), describe_pod(pod), str(restarts),
            format_age(pod), last_lines.get(name, "-"),
        )  # fmt: skip

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000  # a log or another program wants whole lines
    console.print(table)


def describe_pod(pod: Object) -> str:
    """Describe the state of a pod: its phase, and the reason if something is wrong."""
    phase = str(pod.get("status", {}).get("phase", "-"))
    if "deletionTimestamp" in pod["metadata"]:
        phase = "Terminating"
    reason = kubectl_errors.explain_waiting(pod) or kubectl_errors.explain_exit(pod)
    return f"{phase}: {reason}" if reason else phase


def get_last_line(cfg: DictConfig, pod_name: str) -> str:
    """Get the last line that a pod has printed."""
    try:
        lines = kubectl.call(cfg, "logs", pod_name, "--tail=1", "--all-containers").split("\n")
    except RunError:
        return "-"  # the pod was removed in the meantime
    return next(filter(None, reversed(lines)), "-")


def format_age(pod: Object) -> str:
    """Format the age of a pod, such as 5m or 3h."""
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    seconds = int((datetime.now(UTC) - created).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
