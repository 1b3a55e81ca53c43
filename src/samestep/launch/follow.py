"""Follow a run: the logs of all its pods, and a table of them."""

import itertools
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
from samestep.launch import kubectl
from samestep.launch import kubectl_errors as reasons
from samestep.launch.kubectl import ENDS, Node, address, end_of, gone, pods_of, run_of

POLL_S = 1.0
EVENTS_EVERY = 10  # polls; events say why there are fewer pods than there should be
RETRIES = 60  # polls without an answer before we give up; a cluster may be upgraded
LOGS_S = 60  # seconds for which the last lines of a run that ended may take


def logs(cfg: DictConfig, documents: Sequence[Node]) -> int:
    """Print what all pods print, also those to come, until the run ends; 0 if it ended well."""
    run = run_of(documents)
    streams: dict[str, Stream] = {}
    said: set[str] = set()
    silent = 0
    for number in itertools.count():
        time.sleep(POLL_S if number else 0)
        try:
            there = kubectl.get(cfg, address(run))  # before its pods, so that none is missed
            pods = pods_of(cfg)
        except RunError:
            silent += 1
            if not streams or silent > RETRIES:
                raise
            continue
        silent = 0
        for pod, container, key in started(pods):
            stream = streams.get(key)
            if not stream or not (stream.is_alive() or stream.is_whole):
                streams[key] = Stream(cfg, pod, container, stream.last if stream else "")
        ok = end_of(there)
        if there is None or ok is not None:
            break
        for line in (
            *troubles(pods),
            *(refusals(cfg, there) if number % EVENTS_EVERY == 0 else ()),
        ):
            if line not in said:
                print(line, file=sys.stderr, flush=True)
                said.add(line)
    for stream in streams.values():
        stream.join(LOGS_S)
    if there is None and not streams:
        raise gone(cfg)
    print(f"{cfg.run_id}: {ending(there)}", file=sys.stderr)
    return 0 if ok else 1


def status(cfg: DictConfig, documents: Sequence[Node]) -> int:
    """Print one table of the pods, and how the run fares."""
    run = run_of(documents)
    there = kubectl.get(cfg, address(run))
    pods = pods_of(cfg)
    if there is None and not pods:
        raise gone(cfg)
    names = [pod["metadata"]["name"] for pod, _, _ in started(pods)]
    with ThreadPoolExecutor(8) as pool:
        last = dict(zip(names, pool.map(lambda name: last_line(cfg, name), names), strict=True))
    table = Table("pod", "node", "state", "restarts", "age", "last line", box=None, pad_edge=False)
    for pod in pods:
        state = pod.get("status", {})
        name = pod["metadata"]["name"]
        phase = "Terminating" if "deletionTimestamp" in pod["metadata"] else state.get("phase", "-")
        reason = reasons.waiting(pod) or reasons.ended(pod)
        restarts = sum(c.get("restartCount", 0) for c in state.get("containerStatuses", ()))
        table.add_row(
            name, pod["spec"].get("nodeName", "-"), f"{phase}: {reason}" if reason else phase,
            str(restarts), age(pod), last.get(name, "-"),
        )  # fmt: skip
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 1000  # a log or another program wants whole lines
    print(f"{run['kind']} {cfg.run_id}: {ending(there)}")
    for line in refusals(cfg, there) if there else ():
        print(line)
    console.print(table)
    return 0


class Stream(threading.Thread):
    """Prints what a container prints, each line with the name of its pod, until it ends.

    Args:
        since: time of the last line that was printed before.
    """

    def __init__(self, cfg: DictConfig, pod: Node, container: Node, since: str = "") -> None:
        super().__init__(daemon=True)
        name = pod["metadata"]["name"]
        containers = [f"/{container['name']}"] if len(pod["spec"]["containers"]) > 1 else []
        self.prefix = f"[{''.join([name.removeprefix(f'{cfg.run_id}-'), *containers])}] "
        self.last = self.since = since
        self.is_whole = "terminated" in container["state"]  # and not cut off, as by a proxy
        more = [f"--since-time={since}"] if since else []
        self.words = kubectl.words(
            cfg, "logs", name, f"--container={container['name']}", "--follow", "--timestamps", *more
        )
        self.start()

    def run(self) -> None:
        """Read until kubectl ends."""
        with subprocess.Popen(
            self.words,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout
            for line in process.stdout:
                at, _, text = line.partition(" ")
                if at > self.since:  # kubectl counts in whole seconds
                    sys.stdout.write(self.prefix + text)
                    sys.stdout.flush()
                    self.last = at


def started(pods: Sequence[Node]) -> Iterator[tuple[Node, Node, str]]:
    """Pod, container and a key for each container that has printed something, or may have."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses", ()):
            if {"running", "terminated"} & container.get("state", {}).keys():
                uid, count = pod["metadata"]["uid"], container.get("restartCount", 0)
                yield pod, container, f"{uid} {container['name']} {count}"


def ending(there: Node | None) -> str:
    """How the run fares, by its last condition."""
    if there is None:
        return "was removed before it ended"
    if "deletionTimestamp" in there["metadata"]:
        return "is being cancelled"
    true = [c for c in there.get("status", {}).get("conditions", ()) if c["status"] == "True"]
    last = next((c for c in true if c["type"] in ENDS), true[-1] if true else None)
    if last is None:
        return "runs"
    reason = ": ".join(filter(None, [last.get("reason"), last.get("message")]))
    return f"{last['type']} ({reason})" if reason else str(last["type"])


def troubles(pods: Sequence[Node]) -> Iterator[str]:
    """Why pods do not run, and how they ended."""
    for pod in pods:
        if why := reasons.waiting(pod) or reasons.ended(pod):
            yield f"{pod['metadata']['name']}: {why}"


def refusals(cfg: DictConfig, there: Node) -> Iterator[str]:
    """Why there are no pods, or fewer than there should be."""
    if there.get("spec", {}).get("suspend"):
        yield f"{cfg.run_id}: waits in the queue"
    try:
        found = kubectl.get(cfg, "events", "--field-selector=reason=FailedCreate")
    except RunError:
        return  # not everybody may read events
    for event in (found or {"items": []})["items"]:
        about = str(event.get("involvedObject", {}).get("name", ""))
        at = event.get("lastTimestamp") or event.get("eventTime") or ""
        if about.startswith(cfg.run_id) and at >= there["metadata"]["creationTimestamp"]:
            yield f"{cfg.run_id}: pods are refused; {reasons.explained(event.get('message', ''))}"


def last_line(cfg: DictConfig, pod: str) -> str:
    """The last line that a pod printed."""
    try:
        lines = kubectl.call(cfg, "logs", pod, "--tail=1", "--all-containers").split("\n")
    except RunError:
        return "-"  # it has gone in the meantime
    return next(filter(None, reversed(lines)), "-")


def age(pod: Node) -> str:
    """Such as 5m or 3h."""
    since = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    seconds = int((datetime.now(UTC) - since).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
