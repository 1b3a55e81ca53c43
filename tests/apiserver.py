"""A stand-in for a Kubernetes API server: enough of one for kubectl and the Python client.

It takes every object of a kind in ``KINDS``: whether real servers would, tests/servers shows.
Nothing runs in it: a test says what pods there are, how they fare and what they print. Objects
whose owners are gone are collected as garbage.
"""

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.apiserver_http import TICK_S, Handler, Refusal

Node = dict[str, Any]
KINDS = (
    "apps/v1 Deployment", "batch/v1 Job", "elastic.pytorch.org/v1alpha1 ElasticJob",
    "jobset.x-k8s.io/v1alpha2 JobSet", "kubeflow.org/v1 PyTorchJob",
    "networking.k8s.io/v1 NetworkPolicy", "trainer.kubeflow.org/v1alpha1 ClusterTrainingRuntime",
    "trainer.kubeflow.org/v1alpha1 TrainJob", "trainer.kubeflow.org/v1alpha1 TrainingRuntime",
    "v1 Event", "v1 Namespace", "v1 PersistentVolumeClaim", "v1 Pod", "v1 Service",
)  # fmt: skip
GLOBAL = ("ClusterTrainingRuntime", "Namespace")
IMMUTABLE = (  # of a Job
    *("completions", "template", "completionMode", "podFailurePolicy", "backoffLimitPerIndex"),
)


class Server(ThreadingHTTPServer):
    """The state of the cluster.

    Attributes:
        objects: all of them, by kind, namespace and name.
        logs: lines that a pod has printed, by its name.
        refuse: gets method and path of each request, and may raise a Refusal.
        controller: gets each object that is created, to add what a controller makes of it, such as
            pods.
        grace_s: seconds for which deleted pods go on.
        cuts: how many logs are cut off after a line, as by a proxy.
        resumed: how many lines of a log were printed before it was cut, by the name of the pod.
    """

    daemon_threads = True

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        names = {kind: kind.split()[1] for kind in KINDS if kind.split()[1] not in without}
        plurals = {kind: re.sub("y$", "ie", name.lower()) + "s" for kind, name in names.items()}
        self.kinds = {
            kind: {"plural": plurals[kind], "namespaced": name not in GLOBAL}
            for kind, name in names.items()
        }
        self.objects: dict[tuple[str, str, str], Node] = {}
        self.namespaces = {"default"}
        self.logs: dict[str, list[str]] = {}
        self.refuse: Callable[[str, str], None] = lambda method, path: None
        self.controller: Callable[[Node], None] = lambda created: None
        self.grace_s = 0.0
        self.cuts = 0
        self.resumed: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.policies: list[str | None] = []  # of each deletion: who goes first
        self.version = 0
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def kubeconfig(self, folder: Path) -> str:
        """A file that leads kubectl here."""
        path = folder / "kubeconfig"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def put(self, item: Node, namespace: str = "default") -> Node:
        """Create or replace an object; its kind and name say which."""
        with self.lock:
            meta = item.setdefault("metadata", {})
            if "name" not in meta:
                meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
            namespace = meta.setdefault("namespace", namespace)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.version += 1
            given = {"uid": str(uuid.uuid4()), "creationTimestamp": now}
            item["metadata"] = given | meta | {"resourceVersion": str(self.version)}
            kind = f"{item['apiVersion']} {item['kind']}"
            self.objects[kind, namespace, meta["name"]] = item
            return item

    def pod(self, name: str, owner: Node, status: Node, container: str = "trainer") -> Node:
        """Create or replace a pod of ``owner``."""
        old = self.objects.get(("v1 Pod", owner["metadata"]["namespace"], name), {})
        meta = old.get("metadata", {"name": name, "labels": owner["metadata"]["labels"]})
        return self.put({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": meta | {"ownerReferences": [controlled_by(owner)]},
            "spec": {"nodeName": "node-a", "containers": [{"name": container, "image": "x:1"}]},
            "status": status,
        }, owner["metadata"]["namespace"])  # fmt: skip

    def event(self, item: Node, reason: str, message: str) -> Node:
        """Create an event of type Warning about ``item``, as controllers do."""
        meta = item["metadata"]
        about = {key: item[key] for key in ("apiVersion", "kind")}
        about |= {key: meta[key] for key in ("name", "namespace", "uid")}
        now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
        return self.put({
            "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": f"{meta['name']}."},
            "involvedObject": about, "type": "Warning", "reason": reason, "message": message,
            "eventTime": now, "action": "Reconciling", "reportingComponent": "controller",
        }, meta["namespace"])  # fmt: skip

    def expire(self, item: Node) -> None:
        """Delete an object that has ended, as Kubernetes does after its ttlSecondsAfterFinished."""
        kind, meta = f"{item['apiVersion']} {item['kind']}", item["metadata"]
        self.remove((kind, meta["namespace"], meta["name"]))

    def judge(self, kind: str, namespace: str, there: Node | None, new: Node) -> None:
        """Refuse a namespace that is missing, and changes of a Job."""
        if namespace not in self.namespaces:
            raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
        if there and kind.endswith(" Job"):
            for field in IMMUTABLE:
                if there["spec"].get(field) != new["spec"].get(field):
                    raise Refusal(422, "Invalid", f"spec.{field}: field is immutable")

    def of_kind(self, kind: str) -> list[Node]:
        """All objects of a kind such as ``Job``."""
        with self.lock:
            return [item for (k, _, _), item in self.objects.items() if k.split()[1] == kind]

    def remove(self, key: tuple[str, str, str]) -> None:
        """Delete an object with all that it controls; pods and their owners stay for ``grace_s``.

        What it owns without controlling it, such as a Service of a Job, goes afterwards.
        """
        with self.lock:
            doomed = self.controlled(key)
            grace_s = self.grace_s if any(k[0] == "v1 Pod" for k in doomed) else 0
            for k in doomed:
                self.objects[k]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if grace_s:
            threading.Timer(grace_s, self.purge, [doomed]).start()
        else:
            self.purge(doomed)

    def controlled(self, key: tuple[str, str, str]) -> list[tuple[str, str, str]]:
        """The object, and all that it controls, directly or not."""
        uid, found = self.objects[key]["metadata"]["uid"], [key]
        for other, item in self.objects.items():
            owners = item["metadata"].get("ownerReferences", ())
            if any(owner["uid"] == uid and owner.get("controller") for owner in owners):
                found += self.controlled(other)
        return found

    def purge(self, keys: list[tuple[str, str, str]]) -> None:
        """Forget these objects, and then all whose owners are gone."""
        with self.lock:
            for key in keys:
                self.objects.pop(key, None)
            uids = {item["metadata"]["uid"] for item in self.objects.values()}
            orphans = [
                key for key, item in self.objects.items()
                if (owners := item["metadata"].get("ownerReferences"))
                and not any(owner["uid"] in uids for owner in owners)
            ]  # fmt: skip
            if orphans:
                self.purge(orphans)


def controlled_by(owner: Node) -> Node:
    """A reference to the controller that has made an object."""
    own = {key: owner[key] for key in ("apiVersion", "kind")}
    own |= {key: owner["metadata"][key] for key in ("name", "uid")}
    return {**own, "controller": True, "blockOwnerDeletion": True}


@contextmanager
def serve(without: tuple[str, ...] = ()) -> Iterator[Server]:
    """A running server that does not know the kinds ``without``."""
    server = Server(without)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": TICK_S})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
