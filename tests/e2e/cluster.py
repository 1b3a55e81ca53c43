"""The cluster that kubectl reaches, a namespace of its own on it, and a volume for the runs."""

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("E2E_SECONDS", 900))  # that each step may take: slow nodes, pulls
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
WAIT = ["--cascade=foreground", "--timeout=300s"]  # for the pods, too
MAKE_FOLDERS = ["install", "-d", "-m", "1777", "/volume/runs", "/volume/data"]
REMOVE_ALL = ["find", "/volume", "-mindepth", "1", "-delete"]
NAME = "app.kubernetes.io/name=project"
KINDS = "jobs,pods,services,networkpolicies"
INSTANCE = "app.kubernetes.io/instance"
INDEX = "batch.kubernetes.io/job-completion-index"

Object = dict[str, Any]


def kubectl(*words: str, documents: Sequence[Object] = (), timeout: float = 120) -> str:
    """What kubectl says; its error is ours. ``documents`` are its input."""
    text = "\n".join(map(json.dumps, documents))
    done = subprocess.run(
        ["kubectl", *words], input=text, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def until(what: str, probe: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Wait until ``probe`` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"after {seconds:.0f} s still not true: {what}"
        time.sleep(1)
    return found


@dataclass(frozen=True)
class Cluster:
    """A namespace with a claim; ``image`` is on the nodes, or is pulled."""

    image: str
    pull: str
    namespace: str
    volume: str

    def kubectl(self, *words: str, documents: Sequence[Object] = (), timeout: float = 120) -> str:
        """The same, in this namespace."""
        return kubectl(
            f"--namespace={self.namespace}", *words, documents=documents, timeout=timeout
        )

    def launch(self, action: str, run_id: str, *words: str, seconds: float = SECONDS) -> str:
        """``scripts/launch.py action=...``, as a user would; what it prints."""
        command = [
            "scripts/launch.py", "cluster=k8s", f"action={action}", "trainer.accelerator=cpu",
            "trainer.num_nodes=2", f"cluster.namespace={self.namespace}",
            f"cluster.image={self.image}", f"cluster.image_pull_policy={self.pull}",
            f"cluster.volume={self.volume}", "cluster.cpus=250m", "cluster.memory=1536Mi",
            "cluster.shm=64Mi", "cluster.env=[{name: OMP_NUM_THREADS, value: '1'}]",
            "callbacks.progress.log_every_s=1", "data.global_batch_size=60", *words,
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=os.environ | {"RUN_ID": run_id},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            said, why = process.communicate(timeout=seconds)[0], "has failed"
        except subprocess.TimeoutExpired:
            process.kill()
            said, why = process.communicate()[0], f"has not ended after {seconds:.0f} s"
        assert process.returncode == 0, f"action={action} {why}:\n{said}"
        return said

    def job(self, run_id: str) -> Object | None:
        """The Job of a run, if it is there."""
        found = self.kubectl("get", "jobs", f"--selector={INSTANCE}={run_id}", "--output=json")
        return next(iter(json.loads(found)["items"]), None)

    def left(self, run_id: str) -> str:
        """Names of all that belongs to a run."""
        return self.kubectl("get", KINDS, f"--selector={INSTANCE}={run_id}", "--output=name")

    def pods(self, run_id: str, index: int | None = None) -> dict[str, str]:
        """Uid to name of the pods of a run, or of those that are its node ``index``."""
        selector = f"{INSTANCE}={run_id}" + ("" if index is None else f",{INDEX}={index}")
        found = self.kubectl("get", "pods", f"--selector={selector}", "--output=json")
        items = [item["metadata"] for item in json.loads(found)["items"]]
        return {item["uid"]: item["name"] for item in items}

    def lines(self, run_id: str, word: str) -> dict[str, list[str]]:
        """Uid of each pod that is or was node 0 to those of its lines that hold ``word``."""
        found = {}
        for uid, name in self.pods(run_id, index=0).items():
            try:
                log = self.kubectl("logs", name, "--tail=-1")
            except AssertionError:  # not started, or gone meanwhile
                log = ""
            found[uid] = [line for line in log.splitlines() if word in line]
        return found

    def read(self, run_id: str, name: str) -> str:
        """A file of the run in the volume."""
        return self.execute("look", "cat", f"/volume/runs/{run_id}/{name}")

    def execute(self, name: str, *command: str, root: bool = False) -> str:
        """What a command prints, in a pod with the volume at ``/volume``."""
        name = f"{name}-{secrets.token_hex(3)}"
        container = {
            "name": "main",
            "image": self.image,
            "imagePullPolicy": self.pull,
            "command": list(command),
            "securityContext": {"runAsUser": 0} if root else RESTRICTED,
            "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
        }
        claim = {"name": "volume", "persistentVolumeClaim": {"claimName": self.volume}}
        spec = {"restartPolicy": "Never", "containers": [container], "volumes": [claim]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}

        def phase() -> str:
            path = "{.status.phase} {.status.containerStatuses[*].state.waiting.reason}"
            said = self.kubectl("get", "pod", name, f"--output=jsonpath={path}")
            word, _, waits = said.partition(" ")
            assert waits not in ("ErrImageNeverPull", "InvalidImageName"), f"{self.image}: {waits}"
            return word

        self.kubectl("create", "--filename=-", documents=[pod])
        try:
            until(f"pod {name} has ended", lambda: phase() in ("Succeeded", "Failed"))
            log = self.kubectl("logs", name, "--tail=-1")
            assert phase() == "Succeeded", f"{' '.join(command)}: {log}"
            return log
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.kubectl('describe', 'pod', name)}") from None
        finally:
            self.kubectl("delete", "pod", name, "--wait=false")

    def state(self) -> str:
        """Everything that explains a failure: objects, events and logs."""
        commands = (
            ("get", f"{KINDS},persistentvolumeclaims", "--output=wide"),
            ("describe", "jobs,pods"),
            ("get", "events", "--sort-by=.metadata.creationTimestamp"),
            ("logs", f"--selector={NAME}", "--prefix", "--tail=200", "--ignore-errors"),
        )
        texts = []
        for words in commands:
            try:
                texts.append(f"$ kubectl {' '.join(words)}\n{self.kubectl(*words)}")
            except (AssertionError, subprocess.TimeoutExpired) as error:
                texts.append(str(error))
        return "\n".join(texts)


def node_name() -> str:
    """The hostname label of a node that takes ordinary pods."""
    nodes = json.loads(kubectl("get", "nodes", "--output=json"))["items"]
    for node in nodes:
        effects = {taint["effect"] for taint in node["spec"].get("taints", [])}
        if not node["spec"].get("unschedulable") and effects <= {"PreferNoSchedule"}:
            return str(node["metadata"]["labels"]["kubernetes.io/hostname"])
    raise AssertionError(f"none of {len(nodes)} nodes takes pods: kubectl describe nodes")


@contextmanager
def own_namespace(image: str, pull: str) -> Iterator[Cluster]:
    """A cluster whose namespace and volume are made here, and removed again.

    The volume is a folder of one node, so that a bare cluster will do. Only volumes may be one: the
    namespace is held to the restricted Pod Security Standard, which forbids it to pods.
    """
    name = f"project-e2e-{secrets.token_hex(3)}"
    terms = [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node_name()]}]
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **shared,
            "capacity": {"storage": "1Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": {"namespace": name, "name": "runs"},
            "hostPath": {"path": f"/var/tmp/{name}", "type": "DirectoryOrCreate"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": terms}]}},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "runs", "namespace": name},
        "spec": {**shared, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}},
    }
    cluster = Cluster(image, pull, name, "runs")
    enforce = "pod-security.kubernetes.io/enforce"
    with ExitStack() as last_first:  # each is done, also where another fails
        clean_up = last_first.callback
        clean_up(kubectl, "delete", "persistentvolume", name, "--ignore-not-found")
        clean_up(kubectl, "delete", "namespace", name, *WAIT, "--ignore-not-found", timeout=330)
        kubectl("create", "--filename=-", documents=[namespace, volume, claim])
        until("the namespace is ready", lambda: cluster.kubectl("get", "serviceaccounts", "-oname"))
        # Kubernetes changes the owner of most volumes, but not of folders of a node.
        cluster.execute("prepare", *MAKE_FOLDERS, root=True)
        clean_up(
            cluster.execute, "clean", *["find", "/volume", "-mindepth", "1", "-delete"], root=True
        )
        clean_up(kubectl, "label", "namespace", name, f"{enforce}-")
        clean_up(cluster.kubectl, "delete", "jobs", "--all", *WAIT, timeout=330)
        kubectl("label", "namespace", name, f"{enforce}=restricted")
        yield cluster
