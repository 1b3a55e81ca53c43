"""One real cluster for all tests of this folder, and a namespace of its own for each test."""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from filelock import FileLock

from labs.servers import start
from labs.servers.nodes import connect
from library.tests import programs
from samestep.hydra.compose import check as compose
from samestep.launch import render
from tests import launching
from tests.conftest import ROOT, environment

Object = dict[str, Any]
STARTED: "dict[str, subprocess.Popen[bytes]]" = {}  # it runs until all tests have ended
WAIT_S = programs.PATIENCE_S
until = partial(programs.until, seconds=WAIT_S, pause_s=0.3)
KINDS = (
    *("jobs", "jobsets", "trainjobs", "trainingruntimes", "pytorchjobs", "pods", "services"),
    *("deployments", "replicasets", "networkpolicies"),
)
GROUPS = {  # of kinds; others are of the core, which has none
    "jobs": "batch/v1", "jobsets": "jobset.x-k8s.io/v1alpha2",
    "trainjobs": "trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "trainer.kubeflow.org/v1alpha1", "pytorchjobs": "kubeflow.org/v1",
    "deployments": "apps/v1", "replicasets": "apps/v1",
    "networkpolicies": "networking.k8s.io/v1", "roles": "rbac.authorization.k8s.io/v1",
    "rolebindings": "rbac.authorization.k8s.io/v1", "runtimeclasses": "node.k8s.io/v1",
    "resourceclaimtemplates": "resource.k8s.io/v1",
    "validatingadmissionpolicies": "admissionregistration.k8s.io/v1",
    "validatingadmissionpolicybindings": "admissionregistration.k8s.io/v1",
    **dict.fromkeys(
        ("clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses"),
        "kueue.x-k8s.io/v1beta2",
    ),
}  # fmt: skip
CLUSTER_WIDE = (
    *("namespaces", "persistentvolumes", "runtimeclasses"),
    *("clusterqueues", "resourceflavors", "workloadpriorityclasses"),
    *("validatingadmissionpolicies", "validatingadmissionpolicybindings"),
)
SAVES = "trap 'echo saved; exit 143' TERM; echo started $POD; while :; do sleep 0.1; done"
"""What a pod does, for ``Cluster.pods_do``: it trains for ever, and saves when it is stopped."""
STARTED_POD = r"\] started"


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that leads to the cluster. The first process of pytest-xdist starts it for all."""
    if given := os.environ.get("SAMESTEP_KUBECONFIG"):
        return Path(given)  # of a cluster that `python -m labs.servers` has started
    if reason := start.why_not():
        pytest.skip(reason)
    shared, parent = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared, parent = shared.parent, os.getppid()
    folder = shared / "servers"
    found = folder / "kubeconfig"
    with FileLock(shared / "servers.lock"):
        if not found.exists():
            folder.mkdir(exist_ok=True)
            with (folder / "start.log").open("wb") as log:
                STARTED["servers"] = server = subprocess.Popen(
                    [sys.executable, "-m", "labs.servers", folder, f"--while={parent}"],
                    cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            until(lambda: found.exists() or server.poll() is not None, seconds=start.START_S)
            assert server.poll() is None, (folder / "start.log").read_text()
    return found


def plural(kind: str) -> str:
    """The name of a kind in paths."""
    name = kind.lower()
    return (
        f"{name[:-1]}ies"
        if name.endswith("y")
        else f"{name}es"
        if name.endswith("ss")
        else f"{name}s"
    )


@dataclass
class Cluster:
    """A namespace in which the restricted Pod Security Standard is enforced."""

    kubeconfig: Path
    namespace: str
    folder: Path  # in which the commands are typed; submit remembers runs there
    followers: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        # A test asks hundreds of times, and each kubectl would be a process.
        self.url, self.http = connect(self.kubeconfig.parent, self.kubeconfig)

    def call(
        self, method: str, path: str, body: Object | None = None, **query: str
    ) -> requests.Response:
        """Ask the API server as an administrator."""
        kind = "apply-patch+yaml" if method == "PATCH" else "json"
        return self.http.request(
            method, self.url + path, json=body, params=query, timeout=WAIT_S,
            headers={"Content-Type": f"application/{kind}"},
        )  # fmt: skip

    def path_of(self, kind: str, name: str = "") -> str:
        """The path of an object, or of all objects of a kind, such as ``pods``."""
        group, _, version = GROUPS.get(kind, "/v1").rpartition("/")
        api = f"/apis/{group}/{version}" if group else f"/api/{version}"
        place = "" if kind in CLUSTER_WIDE else f"/namespaces/{self.namespace}"
        return f"{api}{place}/{kind}/{name}".rstrip("/")

    def apply(self, *documents: Object) -> None:
        """Create or change objects."""
        for item in documents:
            path = self.path_of(plural(item["kind"]), item["metadata"]["name"])
            answer = self.call("PATCH", path, item, fieldManager="tests", force="true")
            assert answer.ok, answer.text

    def dry_run(self, *documents: Object) -> str:
        """What the server says against new documents, which it only judges."""
        said = []
        for item in documents:
            query = {"dryRun": "All", "fieldValidation": "Strict"}
            answer = self.call("POST", self.path_of(plural(item["kind"])), item, **query)
            said += [] if answer.ok else [answer.json()["message"]]
        return "\n".join(said)

    def get(self, kind: str, name: str = "", selector: str = "") -> Any:
        """An object, None if there is none, or a list of objects."""
        query = {"labelSelector": selector} if selector else {}
        answer = self.call("GET", self.path_of(kind, name), **query)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return None if name else []
        assert answer.ok, answer.text
        return answer.json() if name else answer.json()["items"]

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and later what belongs to it."""
        answer = self.call("DELETE", self.path_of(kind, name), propagationPolicy="Background")
        assert answer.ok, answer.text

    def pods(self, run_id: str, phase: str = "") -> list[Object]:
        """The pods of a run, sorted by name; only those in ``phase``, if one is given."""
        found = self.get("pods", selector=f"app.kubernetes.io/instance={run_id}")
        return [pod for pod in found if phase in ("", pod["status"].get("phase"))]

    def until_training(self, run_id: str) -> list[Object]:
        """Wait until both pods that train are running, and return them."""

        def find() -> list[Object] | None:
            pods = self.pods(run_id, "Running")
            found = [pod for pod in pods if "etcd" not in pod["metadata"]["name"]]
            return found if len(found) == 2 else None

        found: list[Object] = until(find)
        return found

    def left(self) -> list[str]:
        """The names of all that the runs of the namespace consist of."""
        return [f"{kind}/{item['metadata']['name']}" for kind in KINDS for item in self.get(kind)]

    def pods_do(self, script: str) -> None:
        """Let all pods of the namespace that start from now on execute a script of sh.

        Their ``JOB_COMPLETION_INDEX`` and ``POD``, their name, are set.
        """
        self.apply(
            {
                "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "pods"},
                "data": {"script": script},
            }
        )  # fmt: skip

    def words(self, cluster: str) -> list[str]:
        """The overrides of a run of two small pods."""
        return [
            f"cluster={cluster}", f"cluster.namespace={self.namespace}", "cluster.image=x:1",
            "trainer.accelerator=cpu", "cluster.cpus=100m", "cluster.memory=64Mi",
            "cluster.shm=16Mi", *([] if cluster.startswith("elastic") else ["trainer.num_nodes=2"]),
        ]  # fmt: skip

    def samestep(
        self, command: str, *words: str, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """What a command of ``samestep`` does here, within this process."""
        variables = {"KUBECONFIG": str(self.kubeconfig)} | variables
        return launching.samestep(command, *words, cwd=self.folder, **variables)

    def launch(self, cluster: str, run_id: str, *more: str) -> "subprocess.CompletedProcess[str]":
        """Submit a run of two pods."""
        return self.samestep("launch", *self.words(cluster), *more, RUN_ID=run_id)

    def kubeconfig_of(self, token: str = "administrator", server: str = "") -> str:
        """A file of another user, ``guest``, or with another address of the server.

        The namespace is that of its context, for programs that name none.
        """
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["contexts"][0]["context"]["namespace"] = self.namespace
        config["users"][0]["user"]["token"] = token
        if server:
            config["clusters"][0]["cluster"]["server"] = server
        path = self.folder / f"kubeconfig-{secrets.token_hex(4)}"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    def start_logs(
        self, run_id: str, stdout: Any, kubeconfig: str = ""
    ) -> "subprocess.Popen[bytes]":
        """Start ``samestep logs``, which shows them there."""
        place = kubeconfig or str(self.kubeconfig)
        process = subprocess.Popen(
            [sys.executable, ROOT / "tests/samestep_here.py", "logs", run_id], cwd=self.folder,
            env=environment(KUBECONFIG=place, SAMESTEP_PROJECT=str(ROOT)),
            stdout=stdout, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.followers.append(process)
        return process

    def follow(self, run_id: str, started: int = 0, kubeconfig: str = "") -> "Follower":
        """Start ``samestep logs``, and wait until it has shown that so many pods have started."""
        path = self.folder / f"shown-{len(self.followers)}"
        with path.open("wb") as file:
            follower = Follower(self.start_logs(run_id, file, kubeconfig), path)
        follower.until_shown(STARTED_POD, started)
        return follower

    def allow_guest(self, *rules: Object) -> None:
        """Let the user ``guest`` do this here; the API server knows it after a while."""
        api, name = "rbac.authorization.k8s.io", {"name": "guest"}
        may = {"apiVersion": f"{api}/v1", "metadata": name}
        guest = {"apiGroup": api, "kind": "User"} | name
        self.apply(
            may | {"kind": "Role", "rules": [*rules]},
            may | {"kind": "RoleBinding", "subjects": [guest]}
            | {"roleRef": {"apiGroup": api, "kind": "Role"} | name},
        )  # fmt: skip
        place = {"namespace": self.namespace, "verb": "get"}
        place |= {"group": rules[-1]["apiGroups"][-1], "resource": rules[-1]["resources"][0]}
        review = {"kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
        review["spec"] = {"user": "guest", "resourceAttributes": place}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        until(lambda: self.call("POST", path, review).json()["status"]["allowed"])


@dataclass
class Follower:
    """A ``samestep logs``, and the file of what it shows."""

    process: "subprocess.Popen[bytes]"
    path: Path

    def until_shown(self, pattern: str, times: int = 1) -> None:
        """Wait until it has shown it so often."""

        def is_shown() -> bool:
            has_ended = self.process.poll() is not None
            found = len(re.findall(pattern, self.path.read_text())) >= times
            assert found or not has_ended, self.path.read_text()
            return found

        until(is_shown, says=self.path.read_text)

    def end(self) -> tuple[int, str]:
        """Wait for its end; its exit code, and all that it has shown."""
        return self.process.wait(WAIT_S), self.path.read_text()


@pytest.fixture
def cluster(kubeconfig: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A namespace with the claim ``project``, whose pods run until they are stopped."""
    with own_namespace(kubeconfig, tmp_path) as here:
        yield here


@contextmanager
def own_namespace(kubeconfig: Path, folder: Path) -> Iterator[Cluster]:
    """Make a namespace, and remove it afterwards."""
    name = f"test-{secrets.token_hex(4)}"
    here = Cluster(kubeconfig, name, folder)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    volume = {
        "accessModes": ["ReadWriteMany"], "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(folder)}, "persistentVolumeReclaimPolicy": "Delete",
        "claimRef": {"namespace": name, "name": "project"},
    }  # fmt: skip
    here.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}},
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
         "spec": volume | {"storageClassName": ""}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
         "metadata": {"name": "project", "namespace": name},
         "spec": claim | {"storageClassName": "", "volumeName": name}},
    )  # fmt: skip
    here.pods_do(SAVES)
    yield here
    for follower in here.followers:
        follower.kill()
        follower.wait()
    here.delete("namespaces", name)
    here.delete("persistentvolumes", name)


def documents_of(cluster: Cluster, target: str, *more: str, run_id: str = "mine") -> list[Object]:
    """What would be submitted."""
    words = [*cluster.words(target), *more]
    cfg = compose(words)
    cfg.run_id = run_id
    return render.render(cfg, words)


def plant(item: Any, place: str, value: object) -> None:
    """Put a value at a place such as ``spec.rules.0.name``; None removes what is there."""
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    for part in path:
        item = item[part]
    if value is None:
        del item[last]
    else:
        item[last] = value
