"""Start the real servers of a Kubernetes cluster on this machine.

They are etcd, what ``build.sh`` has built, and ``nodes``. Each controller runs with the rights of
an administrator, and the API server calls its webhooks at an address of this machine: the only
differences from a cluster in which they run in pods.
"""

import base64
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from library.tests.programs import free_port

BUILT = Path(os.environ.get("SAMESTEP_SERVERS", "~/.cache/samestep-servers")).expanduser()
BIN, MANIFESTS = BUILT / "bin", BUILT / "manifests"
KUEUE_CERTIFICATES = Path("/etc/kueue/metrics/certs")  # Kueue reads no other folder
START_S = 600  # one that has ended is noticed at once
NAMESPACE = "controllers"
STATUS_SERVER = """
mount -t tmpfs tmpfs /run && mkdir -p /run/secrets/kubernetes.io
cp -r "$0/serviceaccount" /run/secrets/kubernetes.io
mount --bind "$0/k8s-webhook-server" /tmp/k8s-webhook-server
exec "$@"
"""
"""Trainer's status server reads the files of its pod and its certificate at fixed places. Only the
process of this script sees them there: other clusters on this machine have their own."""
KINDS = ("jobs", "jobsets", "trainjobs", "pytorchjobs")
"""Kinds of runs that Kueue starts; its webhooks for other kinds are not registered."""

Object = dict[str, Any]


def why_not() -> str:
    """Why the servers cannot be started here; nothing if they can."""
    if not (BUILT / "stamp").exists():
        return "the servers are not built: labs/servers/build.sh does it, with Go, in 20 minutes"
    missing = [name for name in ("etcd", "openssl") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def can_mount() -> bool:
    """Whether a process here may have mounts of its own."""
    if shutil.which("unshare") is None:
        return False
    words = ("unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/run")
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


class Servers:
    """The processes, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        # Where controllers look for it that have no option for it, below TMPDIR.
        self.certificates = folder / "k8s-webhook-server/serving-certs"
        self.ports = iter(free_port, 0)
        self.server = f"https://127.0.0.1:{next(self.ports)}"
        self.kubeconfig = folder / "starting" / "kubeconfig"

    def start(self) -> None:
        """Start all servers in the order in which they need each other."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.make_certificate()
        self.write_kubeconfig(self.kubeconfig)
        self.start_control_plane()
        self.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}])
        self.start_process("nodes", sys.executable, "-m", "labs.servers.nodes", str(self.folder))
        self.start_jobset()
        self.start_trainer()
        self.start_training_operator()
        self.start_kueue()
        self.write_kubeconfig(self.folder / "kubeconfig")

    def make_certificate(self) -> None:
        """Make the one certificate with which all servers and webhooks identify themselves."""
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
             "/CN=localhost", "-addext", names, "-keyout", self.key, "-out", self.certificate],
            check=True, capture_output=True,
        )  # fmt: skip
        for folder in (self.certificates, KUEUE_CERTIFICATES):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.certificate, folder)
                shutil.copy(self.key, folder)
            except PermissionError:
                pass  # only for Kueue, whose tests are skipped then

    def write_kubeconfig(self, path: Path) -> None:
        """Write a file that leads kubectl here, as an administrator."""
        path.parent.mkdir(exist_ok=True)
        ca = base64.b64encode(self.certificate.read_bytes()).decode()
        here = {"server": self.server, "certificate-authority-data": ca}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{"name": "here", "cluster": here}],
            "users": [{"name": "me", "user": {"token": "administrator"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        }  # fmt: skip
        path.with_suffix(".new").write_text(yaml.safe_dump(config))
        path.with_suffix(".new").rename(path)

    def start_control_plane(self) -> None:
        """Start etcd, the API server, the controllers of Kubernetes and the scheduler."""
        etcd, peer = f"http://127.0.0.1:{next(self.ports)}", f"http://127.0.0.1:{next(self.ports)}"
        self.start_process(
            "etcd", "etcd", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )  # fmt: skip
        tokens = self.folder / "tokens"
        tokens.write_text("administrator,admin,admin,system:masters\nguest,guest,guest,\n")
        self.start_process(
            "kube-apiserver", BIN / "kube-apiserver", f"--etcd-servers={etcd}",
            f"--secure-port={self.server.rpartition(':')[2]}", "--bind-address=127.0.0.1",
            f"--tls-cert-file={self.certificate}", f"--tls-private-key-file={self.key}",
            f"--token-auth-file={tokens}", "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            # At this address Trainer's status server asks for the keys of tokens.
            f"--service-account-issuer={self.server}",
            f"--service-account-jwks-uri={self.server}/openid/v1/jwks",
            f"--service-account-key-file={self.key}",
            f"--service-account-signing-key-file={self.key}",
        )  # fmt: skip
        self.wait_for("kube-apiserver", lambda: self.kubectl("get", "--raw=/readyz"))
        self.start_process(
            "kube-controller-manager", BIN / "kube-controller-manager", "--leader-elect=false",
            f"--kubeconfig={self.kubeconfig}", f"--service-account-private-key-file={self.key}",
            f"--root-ca-file={self.certificate}", f"--secure-port={next(self.ports)}",
            "--node-monitor-grace-period=1h",  # a busy machine is no lost node
        )  # fmt: skip
        self.start_process(
            "kube-scheduler", BIN / "kube-scheduler", "--leader-elect=false",
            f"--kubeconfig={self.kubeconfig}", f"--secure-port={next(self.ports)}",
        )  # fmt: skip

    def start_jobset(self) -> None:
        """Start the controller of JobSet."""
        self.define(read("jobset/bases"))
        self.start_controller("jobset", {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1", "kind": "Configuration",
            "internalCertManagement": {"enable": False},
        }, "jobset/webhook/manifests.yaml")  # fmt: skip

    def start_trainer(self) -> None:
        """Start the controller of Kubeflow Trainer, with the runtime that it ships for torch."""
        self.define(read("trainer/crds"))
        with_status = can_mount()
        place: tuple[object, ...] = ()
        if with_status:
            self.prepare_status_server()
            unshare = ("unshare", "--mount", "--map-root-user")
            place = (*unshare, "sh", "-ec", STATUS_SERVER, self.folder)
        self.start_controller("trainer", {
            "apiVersion": "config.trainer.kubeflow.org/v1alpha1", "kind": "Configuration",
            "certManagement": {"enable": False}, "statusServer": {"port": next(self.ports)},
            "featureGates": {"TrainJobStatus": with_status},
        }, "trainer/webhook/manifests.yaml", *place)  # fmt: skip
        runtime = read("trainer/runtimes/torch_distributed.yaml")
        self.wait_for("trainer", lambda: self.apply(runtime))

    def prepare_status_server(self) -> None:
        """Write what Trainer's status server reads: files of its pod, and a Secret."""
        Path("/tmp/k8s-webhook-server").mkdir(exist_ok=True)
        pod = self.folder / "serviceaccount"
        pod.mkdir()
        # Of its own token it reads only who issues tokens in this cluster.
        issuer = base64.urlsafe_b64encode(json.dumps({"iss": self.server}).encode()).decode()
        (pod / "token").write_text(f"header.{issuer.rstrip('=')}.signature")
        (pod / "namespace").write_text(NAMESPACE)
        ca = base64.b64encode(self.certificate.read_bytes()).decode()
        metadata = {"namespace": NAMESPACE, "name": "kubeflow-trainer-webhook-cert"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
        self.apply([secret | {"data": {"ca.crt": ca}}])

    def start_training_operator(self) -> None:
        """Start the training operator, which knows PyTorchJob.

        It manages certificates of its own and cannot be told not to: it waits for a Secret, for a
        file at a fixed place and for a configuration of webhooks, into which it writes its own
        authority. It gets all three; the webhook that the API server calls is another one.
        """
        self.define(
            [item for item in read("training-operator/crds") if "pytorchjobs" in name(item)]
        )
        fixed = Path("/tmp/k8s-webhook-server/serving-certs")
        fixed.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.certificate, fixed)
        decoy = read("training-operator/webhook/manifests.yaml")[0]
        decoy["metadata"]["name"] = "validator.training-operator.kubeflow.org"
        for webhook in decoy["webhooks"]:
            webhook["clientConfig"]["service"]["namespace"] = NAMESPACE
            webhook["rules"] = []
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"namespace": NAMESPACE, "name": "training-operator-webhook-cert"},
        }
        self.apply([decoy, secret])
        port = next(self.ports)
        self.start_process(
            "training-operator", BIN / "training-operator", "--enable-scheme=pytorchjob",
            f"--webhook-server-port={port}", "--metrics-bind-address=0",
            "--health-probe-bind-address=0", MY_POD_NAMESPACE=NAMESPACE,
        )  # fmt: skip
        self.register("training-operator/webhook/manifests.yaml", port, only=("pytorchjobs",))

    def start_kueue(self) -> None:
        """Start Kueue, where its certificates can be put into their place."""
        if not os.access(KUEUE_CERTIFICATES, os.W_OK):
            return
        self.define(read("kueue/bases"))
        frameworks = [
            "batch/job",
            "jobset.x-k8s.io/jobset",
            "trainer.kubeflow.org/trainjob",
            "kubeflow.org/pytorchjob",
        ]
        self.start_controller("kueue", {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2", "kind": "Configuration",
            "namespace": NAMESPACE, "internalCertManagement": {"enable": False},
            "webhook": {"certDir": str(self.certificates)},
            "featureGates": {"VisibilityOnDemand": False},
            "integrations": {"frameworks": frameworks},
        }, "kueue/webhook/manifests.yaml")  # fmt: skip

    def define(self, kinds: list[Object]) -> None:
        """Let the API server know kinds of objects; a controller ends where it does not yet."""
        self.apply(kinds)
        established = ("wait", "--for=condition=Established", "crds", "--all")
        self.wait_for("kube-apiserver", lambda: self.kubectl(*established))

    def start_controller(self, name: str, config: Object, webhooks: str, *before: object) -> None:
        """Start a controller by a configuration file, as all of them write it, and its webhooks.

        ``before`` are the words of a command that starts the controller.
        """
        port = next(self.ports)
        config |= {
            "webhook": config.get("webhook", {}) | {"port": port, "host": "127.0.0.1"},
            "leaderElection": {"leaderElect": False},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{next(self.ports)}"},
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        self.start_process(name, *before, BIN / name, f"--config={file}")
        self.register(webhooks, port)

    def register(self, file: str, port: int, only: tuple[str, ...] = ()) -> None:
        """Register the webhooks of ``file`` at a port of this machine, once there is an answer."""
        source = file.partition("/")[0]
        configurations = []
        for item in read(file):
            item["metadata"]["name"] = f"{source}-{item['kind'].lower()}"
            item["webhooks"] = [hook for hook in item["webhooks"] if is_wanted(source, hook, only)]
            for webhook in item["webhooks"]:
                path = webhook["clientConfig"]["service"]["path"]
                ca = base64.b64encode(self.certificate.read_bytes()).decode()
                webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": ca}
                webhook["timeoutSeconds"] = 30  # the longest that there is
            configurations.append(item)
        self.wait_for(source, lambda: socket.create_connection(("127.0.0.1", port), 1).close())
        self.apply(configurations)

    def start_process(self, name: str, *command: object, **variables: str) -> None:
        """Start a server; what it prints goes to its log."""
        environment = os.environ | {"KUBECONFIG": str(self.kubeconfig), "TMPDIR": str(self.folder)}
        environment.pop("GOGC", None)  # tests/conftest.py switches it off for kubectl
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=environment | variables,
            )  # fmt: skip

    def kubectl(self, *words: str, text: str = "") -> str:
        """Run kubectl as an administrator."""
        done = subprocess.run(
            [BIN / "kubectl", f"--kubeconfig={self.kubeconfig}", *words], input=text, text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout

    def apply(self, documents: list[Object]) -> None:
        """Create or change objects; on the server, because CRDs are too large for an annotation."""
        options = ("--server-side", "--force-conflicts", "--filename=-")
        self.kubectl("apply", *options, text="\n".join(map(json.dumps, documents)))

    def wait_for(self, name: str, ask: Callable[[], Any]) -> None:
        """Ask until there is an answer."""
        deadline = time.monotonic() + START_S
        while True:
            self.raise_if_one_has_ended()
            try:
                ask()
                return
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{name} does not answer: {error}") from None
            time.sleep(0.3)

    def raise_if_one_has_ended(self) -> None:
        """A server that ends took a wrong option; its log says which."""
        for server, process in self.processes.items():
            if process.poll() is not None:
                log = (self.folder / f"{server}.log").read_text(errors="replace")
                raise RuntimeError(f"{server} has ended:\n{log[-3000:]}")

    def stop(self) -> None:
        """End all servers."""
        for process in reversed(self.processes.values()):
            process.kill()
        for process in self.processes.values():
            process.wait()


def read(path: str) -> list[Object]:
    """Read the manifests that a controller ships: a file, or all files of a folder."""
    place = MANIFESTS / path
    files = sorted(place.glob("*.yaml")) if place.is_dir() else [place]
    # Megabytes of YAML, for which Python's own parser takes many seconds.
    parse = functools.partial(yaml.load_all, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    documents = [item for file in files for item in parse(file.read_text())]
    return [item for item in documents if item and "metadata" in item]


def name(item: Object) -> str:
    return str(item["metadata"]["name"])


def is_wanted(source: str, webhook: Object, only: tuple[str, ...]) -> bool:
    """Whether the controller serves the webhook; Kueue has more, for kinds that are not here."""
    rule = webhook["rules"][0]
    if source == "kueue":
        return rule["resources"][0] in KINDS or "kueue.x-k8s.io" in rule["apiGroups"]
    return not only or rule["resources"][0] in only
