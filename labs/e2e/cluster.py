"""The cluster that kubectl reaches, with a namespace and a volume for the runs of the tests."""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.tests import programs

ROOT = Path(__file__).parents[2]
TRIES, TRY_S = 3, 60  # of one call of kubectl; a connection may be lost
NO_ANSWER = re.compile("Unable to connect to the server|[Tt]imeout|connection refused")
SECONDS = float(os.environ.get("E2E_SECONDS", 900))  # limit of each wait; nodes and pulls are slow
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
WAIT = ["--cascade=foreground", "--timeout=300s"]  # until the pods have ended too
MAKE_FOLDERS = ["install", "-d", "-m", "1777", "/volume/runs", "/volume/data"]
REMOVE_ALL = ["find", "/volume", "-mindepth", "1", "-delete"]
KINDS = "jobs,pods,services,networkpolicies"
INSTANCE = "app.kubernetes.io/instance"
INDICES = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")

Object = dict[str, Any]


def kubectl(*words: str, documents: Sequence[Object] = (), timeout: float = TRY_S) -> str:
    """Run kubectl with ``documents`` as its input, and return what it prints; it must succeed.

    A call without an answer is tried again; after ``timeout`` seconds it is ended before.
    """
    text = "\n".join(map(json.dumps, documents))
    command = ["kubectl", *words]
    for attempt in range(TRIES):
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            continue
        if NO_ANSWER.search(done.stderr) and attempt + 1 < TRIES:
            continue
        # The call before may have done it, although it has not answered.
        is_done = attempt > 0 and re.search(r"\((AlreadyExists|NotFound)\)", done.stderr)
        assert done.returncode == 0 or is_done, f"{' '.join(command)}: {done.stderr.strip()}"
        return done.stdout
    raise AssertionError(f"{' '.join(command)}: no answer in {TRIES} times {timeout:.0f} s")


def until(what: str, probe: Callable[[], Any]) -> Any:
    """Wait until ``probe`` returns a true value, and return that value."""
    return programs.until(probe, SECONDS, lambda: f"still not true: {what}", pause_s=1)


@dataclass(frozen=True)
class Cluster:
    """A namespace with a volume claim.

    Args:
        image: is on the nodes, or can be pulled.
        pull: ``imagePullPolicy`` of the pods.
        namespace: name of the namespace.
        volume: name of the claim.
    """

    image: str
    pull: str
    namespace: str
    volume: str

    def kubectl(self, *words: str, documents: Sequence[Object] = (), timeout: float = TRY_S) -> str:
        """Run kubectl in this namespace."""
        return kubectl(
            f"--namespace={self.namespace}", *words, documents=documents, timeout=timeout
        )

    def launch(self, target: str, run_id: str, *words: str) -> str:
        """Submit a run of two nodes; with ``--check`` among the words only check it."""
        return self.samestep(
            "launch", f"cluster={target}", "trainer.accelerator=cpu", "trainer.num_nodes=2",
            f"cluster.namespace={self.namespace}", f"cluster.image={self.image}",
            f"cluster.image_pull_policy={self.pull}", f"cluster.volume={self.volume}",
            "cluster.cpus=250m", "cluster.memory=1536Mi", "cluster.shm=64Mi",
            "cluster.env=[{name: OMP_NUM_THREADS, value: '1'}]",
            "callbacks.progress.log_every_s=1", "data.global_batch_size=60", *words, RUN_ID=run_id,
        )  # fmt: skip

    def samestep(self, *words: str, **variables: str) -> str:
        """Do what a command of ``samestep`` says, and return what it prints; it must succeed.

        Every command may be repeated, so one in which kubectl got no answer is tried again.
        """
        for _ in range(TRIES):
            exit_code, output = self.samestep_once(words, variables)
            if exit_code == 0 or "no answer in" not in output:
                break
        assert exit_code == 0, f"samestep {words[0]} has failed:\n{output}"
        return output

    def samestep_once(self, words: Sequence[str], variables: dict[str, str]) -> tuple[int, str]:
        """Run a command of ``samestep``, and return its exit code and what it prints."""
        # What it remembers of a run stays out of the repository.
        folder = Path(tempfile.gettempdir(), f"{self.namespace}-{os.getpid()}")
        folder.mkdir(exist_ok=True)
        try:
            done = subprocess.run(
                [sys.executable, ROOT / "tests/samestep_here.py", *words],
                cwd=folder, env=os.environ | variables,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace")
            raise AssertionError(
                f"samestep {words[0]} has not ended after {SECONDS:.0f} s:\n{said}"
            ) from None
        return done.returncode, done.stdout

    def knows(self, kind: str) -> bool:
        """Whether the cluster has objects of a kind, such as ``jobsets``."""
        return bool(
            re.search(rf"^{kind}\b", kubectl("api-resources", "--output=name"), re.MULTILINE)
        )

    def left(self, run_id: str) -> str:
        """The names of all objects of a run."""
        return self.kubectl("get", KINDS, f"--selector={INSTANCE}={run_id}", "--output=name")

    def pods(self, run_id: str, index: int | None = None) -> list[Object]:
        """The pods of a run, or those that are or were its node ``index``."""
        found = self.kubectl("get", "pods", f"--selector={INSTANCE}={run_id}", "--output=json")
        pods: list[Object] = json.loads(found)["items"]
        return [pod for pod in pods if index is None or is_node(pod, index)]

    def running_pod(self, run_id: str, index: int) -> str:
        """The name of the pod that is the node ``index`` now."""
        pods = [pod for pod in self.pods(run_id, index) if pod["status"]["phase"] == "Running"]
        (name,) = [pod["metadata"]["name"] for pod in pods]
        return str(name)

    def lines(self, run_id: str, word: str) -> dict[str, list[str]]:
        """The lines with ``word`` of each container that is or was node 0, by pod and restart."""
        found = {}
        for pod in self.pods(run_id, index=0):
            try:
                log = self.kubectl("logs", pod["metadata"]["name"], "--tail=-1")
            except AssertionError:  # not started yet, or removed meanwhile
                log = ""
            restarts = [item["restartCount"] for item in pod["status"].get("containerStatuses", ())]
            key = f"{pod['metadata']['uid']} {restarts}"
            found[key] = [line for line in log.splitlines() if word in line]
        return found

    def read(self, run_id: str, name: str) -> str:
        """Read a file of the run from the volume."""
        return self.execute("look", "cat", f"/volume/runs/{run_id}/{name}")

    def execute(self, name: str, *command: str, root: bool = False) -> str:
        """Run a command in a pod with the volume at ``/volume``, and return what it prints."""
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
            answer = self.kubectl("get", "pod", name, f"--output=jsonpath={path}")
            word, _, reason = answer.partition(" ")
            assert reason not in ("ErrImageNeverPull", "InvalidImageName"), (
                f"{self.image}: {reason}"
            )
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

    def state(self, run_id: str) -> str:
        """What explains why a run failed: its own objects, their logs, and the last events."""
        selector = f"--selector={INSTANCE}={run_id}"
        commands = (
            ("get", KINDS, selector, "--output=wide"),
            ("describe", "jobs,pods", selector, "--show-events=false"),
            ("logs", selector, "--prefix", "--tail=200", "--ignore-errors"),
            ("get", "events", "--sort-by=.metadata.creationTimestamp"),
        )
        texts = []
        for words in commands:
            try:
                texts.append(f"$ kubectl {' '.join(words)}\n{self.kubectl(*words)}")
            except AssertionError as error:
                texts.append(str(error))
        return "\n".join(texts)


def is_node(pod: Object, index: int) -> bool:
    """Whether a pod is the node ``index`` of its run."""
    return str(index) in [pod["metadata"]["labels"].get(label) for label in INDICES]


def node_name() -> str:
    """The hostname label of a node that accepts ordinary pods."""
    nodes = json.loads(kubectl("get", "nodes", "--output=json"))["items"]
    for node in nodes:
        effects = {taint["effect"] for taint in node["spec"].get("taints", [])}
        if not node["spec"].get("unschedulable") and effects <= {"PreferNoSchedule"}:
            return str(node["metadata"]["labels"]["kubernetes.io/hostname"])
    raise AssertionError(f"none of {len(nodes)} nodes accepts pods: kubectl describe nodes")


@contextmanager
def own_namespace(image: str, pull: str) -> Iterator[Cluster]:
    """Create a namespace and a volume for the tests, and remove them afterwards.

    The volume is a folder of one node, so the cluster needs no storage of its own. The namespace
    enforces the restricted Pod Security Standard, under which a pod may not mount such a folder
    itself; a PersistentVolume may.
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
    # Clean-up runs in reverse order, and goes on when one step fails.
    with ExitStack() as stack:
        clean_up = stack.callback
        clean_up(kubectl, "delete", "persistentvolume", name, "--ignore-not-found")
        clean_up(kubectl, "delete", "namespace", name, *WAIT, "--ignore-not-found", timeout=330)
        kubectl("create", "--filename=-", documents=[namespace, volume, claim])
        until("the namespace is ready", lambda: cluster.kubectl("get", "serviceaccounts", "-oname"))
        # Kubernetes changes the owner of most volumes, but not of a folder of a node.
        cluster.execute("prepare", *MAKE_FOLDERS, root=True)
        clean_up(cluster.execute, "clean", *REMOVE_ALL, root=True)
        clean_up(kubectl, "label", "namespace", name, f"{enforce}-")
        clean_up(cluster.kubectl, "delete", "jobs", "--all", *WAIT, timeout=330)
        kubectl("label", "namespace", name, f"{enforce}=restricted")
        yield cluster
