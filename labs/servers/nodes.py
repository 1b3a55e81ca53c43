"""Nodes that run pods as processes: what a kubelet does, without containers.

python -m labs.servers.nodes FOLDER

A pod on them is one process on this machine: ``sh -c`` with the script that the ConfigMap ``pods``
of its namespace has. Everything else is as on a real node: the pod gets SIGTERM when it is deleted
and SIGKILL after its grace period, its exit code and the end of its log are in its status, kubectl
reads and follows its log, and a container that fails is started again where ``restartPolicy`` says
so. The third node has a taint. FOLDER has the kubeconfig.
"""

import os
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import requests
import yaml

from library.tests.programs import PATIENCE_S

NODES = ("node-a", "node-b", "node-c")
TAINTS = {"node-c": [{"key": "team", "value": "other", "effect": "NoSchedule"}]}
POLL_S, HEARTBEAT_S = 0.3, 10
CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": "8"}
MESSAGE_BYTES = 2048  # of the log, under FallbackToLogsOnError
SCRIPT = "echo started; exec sleep 3600"

Object = dict[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Container:
    """The process of a pod; ``log`` has one line per line, each with its time before it."""

    log: Path
    process: subprocess.Popen[bytes]
    copier: threading.Thread
    restarts: int = 0
    started: str = field(default_factory=now)
    terminated_at: float = 0  # when SIGTERM was sent

    @property
    def has_ended(self) -> bool:
        """Whether it has, and all that it has printed is in the log."""
        return self.process.poll() is not None and not self.copier.is_alive()

    def signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):  # its last lines may still be on their way
            os.killpg(self.process.pid, signum)


def connect(folder: Path, kubeconfig: Path) -> tuple[str, requests.Session]:
    """The address of the API server whose certificate is in ``folder``, and a client for it."""
    config = yaml.safe_load(kubeconfig.read_text())
    http = requests.Session()
    http.trust_env = False  # variables such as REQUESTS_CA_BUNDLE would win
    http.verify = str(folder / "tls.crt")
    http.headers["Authorization"] = f"Bearer {config['users'][0]['user']['token']}"
    return config["clusters"][0]["cluster"]["server"], http


class Nodes:
    """All nodes of the cluster; one loop looks after them."""

    def __init__(self, folder: Path) -> None:
        self.url, self.http = connect(folder, folder / "starting/kubeconfig")
        self.folder = folder
        self.containers: dict[str, Container] = {}  # by uid of the pod
        self.logs: dict[tuple[str, str], Container] = {}  # by namespace and name

    def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        kind: str = "strategic-merge-patch",
    ) -> Object:
        """Ask the API server; an object that has gone meanwhile is an empty answer."""
        headers = {
            "Content-Type": f"application/{kind}+json" if method == "PATCH" else "application/json"
        }
        answer = self.http.request(
            method, self.url + path, json=body, headers=headers, timeout=PATIENCE_S
        )
        return dict(answer.json()) if answer.ok else {}

    def run(self, port: int) -> None:
        """Keep the nodes alive and look after their pods, for ever."""
        last_heartbeat = 0.0
        while True:
            if time.monotonic() - last_heartbeat > HEARTBEAT_S:
                for name in NODES:
                    self.keep_alive(name, port)
                last_heartbeat = time.monotonic()
            # Version 0 is what the server remembers, which costs it little.
            pods = self.call("GET", "/api/v1/pods?resourceVersion=0").get("items", [])
            for pod in pods:
                if pod["spec"].get("nodeName") in NODES:
                    self.look_after(pod)
            self.forget({pod["metadata"]["uid"] for pod in pods})
            time.sleep(POLL_S)

    def keep_alive(self, name: str, port: int) -> None:
        """Create the node if there is none, and say that it is ready."""
        path = f"/api/v1/nodes/{name}"
        if not self.call("GET", path):
            meta = {"name": name, "labels": {"kubernetes.io/hostname": name}}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": meta}
            node["spec"] = {"taints": TAINTS.get(name, [])}
            self.call("POST", "/api/v1/nodes", node)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastHeartbeatTime": now(),
            "lastTransitionTime": now(),
        }
        self.call("PATCH", f"{path}/status", {"status": {
            "capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }})  # fmt: skip

    def look_after(self, pod: Object) -> None:
        """Start the pod, report that it has ended, or end it, whatever it needs now."""
        meta, phase = pod["metadata"], pod["status"].get("phase")
        container = self.containers.get(meta["uid"])
        is_deleted = "deletionTimestamp" in meta
        if container is None:
            if phase == "Pending" and not is_deleted:
                self.start(pod)
            elif is_deleted:
                self.remove(pod)
        elif container.has_ended:
            if phase == "Running":
                self.report_end(pod, container, is_deleted=is_deleted)
            if is_deleted:
                self.remove(pod)
        elif is_deleted:
            self.stop(container, meta.get("deletionGracePeriodSeconds", 30))
        elif phase == "Failed":
            # A test has evicted it, as kubelet does when it has killed the containers.
            container.signal(signal.SIGKILL)

    def start(self, pod: Object, restarts: int = 0) -> None:
        """Start the process of a pod, and report that it runs."""
        meta, spec = pod["metadata"], pod["spec"]["containers"][0]
        path = f"/api/v1/namespaces/{meta['namespace']}/configmaps/pods"
        script = self.call("GET", path).get("data", {}).get("script", SCRIPT)
        log = self.folder / "pods" / f"{meta['uid']}-{restarts}.log"
        log.parent.mkdir(exist_ok=True)
        annotations = meta.get("annotations", {})
        # What the API server leaves to kubelet: a value may be a field of the pod.
        index = annotations.get("batch.kubernetes.io/job-completion-index", "")
        values = {item["name"]: item.get("value", index) for item in spec.get("env", ())}
        words = [*spec.get("command", ()), *spec.get("args", ())]
        variables = {
            "PATH": os.environ["PATH"],
            "POD": meta["name"],
            "JOB_COMPLETION_INDEX": index,
            "WORDS": shlex.join(words),
            "RESTARTS": str(restarts),
        }
        process = subprocess.Popen(
            ["sh", "-c", script], env=variables | values, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        log.touch()
        copier = threading.Thread(target=copy_with_times, args=(process.stdout, log), daemon=True)
        copier.start()
        container = Container(log, process, copier, restarts)
        self.containers[meta["uid"]] = self.logs[meta["namespace"], meta["name"]] = container
        self.report(pod, "Running", container, {"running": {"startedAt": container.started}})

    def report_end(self, pod: Object, container: Container, *, is_deleted: bool) -> None:
        """Report the exit code; start a container again that failed, if the pod wants that."""
        code = container.process.returncode
        exit_code = code if code >= 0 else 128 - code
        policy = pod["spec"]["restartPolicy"]
        is_restarted = policy == "Always" or (policy == "OnFailure" and exit_code)
        if is_restarted and not is_deleted:
            self.start(pod, container.restarts + 1)
            return
        end = {
            "exitCode": exit_code, "reason": "Error" if exit_code else "Completed",
            "startedAt": container.started, "finishedAt": now(),
        }  # fmt: skip
        if exit_code:
            lines = container.log.read_text().splitlines()
            end["message"] = "\n".join(line.partition(" ")[2] for line in lines)[-MESSAGE_BYTES:]
        self.report(pod, "Failed" if exit_code else "Succeeded", container, {"terminated": end})

    def report(self, pod: Object, phase: str, container: Container, state: Object) -> None:
        """Write the status of a pod."""
        is_ready = "running" in state
        conditions = [
            {"type": kind, "status": str(is_ready), "lastTransitionTime": now()}
            for kind in ("Ready", "ContainersReady")
        ]
        spec = pod["spec"]["containers"][0]
        status = {
            "name": spec["name"], "image": spec["image"], "imageID": spec["image"], "state": state,
            "ready": is_ready, "started": is_ready, "restartCount": container.restarts,
            "containerID": f"process://{container.process.pid}",
        }  # fmt: skip
        started = [{"type": "Initialized", "status": "True", "lastTransitionTime": now()}]
        self.call("PATCH", f"{path_of(pod)}/status", {"status": {
            "phase": phase, "conditions": conditions + started, "containerStatuses": [status],
            "startTime": pod["status"].get("startTime", now()),
            "podIP": "127.0.0.1", "hostIP": "127.0.0.1",
        }})  # fmt: skip

    def stop(self, container: Container, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL when the grace period is over."""
        if not container.terminated_at:
            container.terminated_at = time.monotonic()
            container.signal(signal.SIGTERM)
        elif time.monotonic() - container.terminated_at > grace_s:
            container.signal(signal.SIGKILL)

    def remove(self, pod: Object) -> None:
        """Let the API server forget a pod that was deleted and has ended."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        self.call("DELETE", path_of(pod), body)

    def forget(self, uids: set[str]) -> None:
        """Kill what is left of pods that were deleted by force."""
        for uid in self.containers.keys() - uids:
            container = self.containers.pop(uid)
            if container.process.poll() is None:
                container.signal(signal.SIGKILL)


def path_of(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def copy_with_times(stream: Any, log: Path) -> None:
    """Copy lines into a log, each with the time at which it came."""
    with log.open("ab", buffering=0) as file:
        for line in stream:
            file.write(f"{datetime.now(UTC).isoformat().replace('+00:00', 'Z')} ".encode() + line)


class Logs(BaseHTTPRequestHandler):
    """What the API server asks a kubelet for: the log of a container, and to follow it."""

    nodes: Nodes
    protocol_version = "HTTP/1.0"  # the end of the connection is the end of the log

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""

    def do_GET(self) -> None:
        """``/containerLogs/NAMESPACE/POD/CONTAINER?follow=true&timestamps=true&tailLines=1...``"""
        place, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        _, _, namespace, pod, *_ = place.path.split("/")
        container = self.nodes.logs.get((namespace, pod))
        if container is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        since = query.get("sinceTime", [""])[0]
        if "sinceSeconds" in query:
            then = datetime.now(UTC).timestamp() - int(query["sinceSeconds"][0])
            since = datetime.fromtimestamp(then, UTC).isoformat().replace("+00:00", "Z")
        is_last = False
        with container.log.open("rb") as file:
            lines = file.readlines()
            if "tailLines" in query:
                lines = lines[-int(query["tailLines"][0]) or len(lines) :]
            while True:
                for line in lines:
                    when, _, text = line.partition(b" ")
                    if when.decode() >= since:
                        self.wfile.write(line if "timestamps" in query else text)
                if is_last or "follow" not in query:
                    return
                if not (is_last := container.has_ended):
                    time.sleep(POLL_S)
                lines = file.readlines()


def main() -> None:
    """Serve the logs, and look after the pods."""
    folder = Path(sys.argv[1])
    nodes = Nodes(folder)
    Logs.nodes = nodes
    server = ThreadingHTTPServer(("127.0.0.1", 0), Logs)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    nodes.run(server.server_port)


if __name__ == "__main__":
    main()
