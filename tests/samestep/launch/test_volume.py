"""The claim of the volume, and the Job that fills it: its program really runs, on this machine."""

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.hydra.compose import check
from samestep.launch import check as rules
from samestep.launch import volume
from tests import mirror
from tests.apiserver import Server, serve
from tests.conftest import ROOT, environment
from tests.launching import launch, samestep
from tests.samestep.launch.test_kubernetes import variables
from tests.samestep.launch.test_targets import pod

WORDS = ["cluster=k8s", "cluster.image=ghcr.io/me/project:1.2.3"]
SIZE = "cluster.volume_size=20Gi"
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


def rendered(*words: str):
    cfg = check(words)
    cfg.run_id = volume.name_job(cfg)
    documents = volume.render_job(cfg, words)
    assert list(rules.faults(cfg, documents)) == []
    return documents


def test_the_data_are_prepared_in_the_pod_that_trains():
    words = ["cluster.pull_secret=ghcr", "cluster.user=1234", "cluster.secret=keys"]
    (job,) = rendered("cluster=k8s", "data=mnist", "trainer.num_nodes=2", *words)
    assert job["metadata"]["name"] == "data-mnist"
    ours, theirs = job["spec"]["template"], pod("k8s-cpu", *words)
    container, trains = ours["spec"]["containers"][0], theirs["spec"]["containers"][0]
    assert container.pop("command") == ["python", "scripts/prepare_data.py"]
    assert (ROOT / "scripts/prepare_data.py").is_file()
    given = ["cluster=k8s", "data=mnist", "trainer.num_nodes=2", *words]
    assert container.pop("args") == given
    assert theirs["spec"].pop("subdomain") == "cifar"
    for key in ("args", "env"):
        trains.pop(key)
    assert container.pop("env") == [{"name": "RUN_ID", "value": "data-mnist"}]
    assert (ours.pop("metadata") | theirs.pop("metadata")).keys() == {"labels", "annotations"}
    assert ours == theirs
    assert ours["spec"]["imagePullSecrets"] == [{"name": "ghcr"}]


def test_a_claim_is_made_only_if_it_has_a_size():
    assert [item["kind"] for item in rendered("cluster=k8s")] == ["Job"]
    place = ["cluster.volume=team", "cluster.storage_class=fast", "cluster.namespace=ml"]
    claim, _ = rendered("cluster=k8s", SIZE, "cluster.access_mode=ReadWriteOnce", *place)
    assert claim["kind"] == "PersistentVolumeClaim"
    assert (claim["metadata"]["name"], claim["metadata"]["namespace"]) == ("team", "ml")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "20Gi"}},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=jobset"], "cluster=jobset --data: only cluster=k8s fills a volume"),
        (["cluster=swarm"], "cluster=swarm --data: only cluster=k8s fills a volume"),
        (["cluster.volume=null"], "cluster.volume=null: --data fills a volume"),
        (["cluster.access_mode=ReadWriteAll"], "one of ReadWriteMany, ReadWriteOnce"),
        (["cluster.image=registry.example.com/project:1"], "is only an example"),
    ],
)
def test_what_cannot_be_filled_is_refused_with_one_line(words, message):
    result = launch(*WORDS, *words, "--data")
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Server]:
    """A cluster that runs the pod of each Job, as a process of this machine."""
    with serve() as server:
        server.variables = variables(server, tmp_path)
        threads: list[threading.Thread] = []

        def start(created) -> None:
            if created["kind"] == "Job":
                threads.append(threading.Thread(target=work, args=(server, created)))
                threads[-1].start()

        server.controller = start
        yield server
        for thread in threads:
            thread.join()


def work(server: Server, job) -> None:
    """Run the pod of a Job, and end the Job."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    interpreter, *command = container["command"]
    assert interpreter == "python"
    done = subprocess.run(
        [sys.executable, *command, *container["args"]],
        cwd=ROOT, env=environment(no_proxy="127.0.0.1"), capture_output=True, text=True,
    )  # fmt: skip
    server.logs["data-mnist-x"] = (done.stdout + done.stderr).splitlines()
    ended = {"terminated": {"exitCode": done.returncode}}
    status = {"name": "trainer", "restartCount": 0, "state": ended}
    phase = "Failed" if done.returncode else "Succeeded"
    server.pod("data-mnist-x", job, {"phase": phase, "containerStatuses": [status]})
    condition = {"type": "Failed" if done.returncode else "Complete", "status": "True"}
    server.put(job | {"status": {"conditions": [condition]}})


@needs_kubectl
def test_a_new_claim_is_filled_and_what_was_lost_is_filled_again(cluster, tmp_path):
    (tmp_path / "official").mkdir()
    miniature, root = mirror.mnist(tmp_path / "official"), tmp_path / "volume"

    def fill(url: str):
        words = [*WORDS, SIZE, *miniature.overrides(root, url), "--data"]
        return launch(*words, **cluster.variables)

    with mirror.serve(tmp_path / "official") as official:
        first = fill(official.url)
        assert (first.returncode, first.stderr) == (0, "data-mnist: Complete\n")
        assert "persistentvolumeclaim/project created" in first.stdout
        assert (
            "[pod/data-mnist-x/trainer] 200 training and 50 test samples are ready" in first.stdout
        )
        files = {name: (root / "mnist" / name).read_bytes() for name in miniature.files}
        assert {name: mirror.md5(content) for name, content in files.items()} == miniature.files

        shutil.rmtree(root / "mnist")
        again = fill(official.url)
        assert (again.returncode, again.stderr) == (0, "data-mnist: Complete\n")
        assert "the claim project exists, and stays as it is" in again.stdout
        assert (root / "mnist").is_dir()

    shutil.rmtree(root / "mnist")
    failed = fill("http://127.0.0.1:9")  # nobody answers there
    assert failed.returncode == 1
    assert "[pod/data-mnist-x/trainer] error: " in failed.stdout
    cancelled = samestep("cancel", "data-mnist", *WORDS, **cluster.variables)
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    assert [kind for kind, _, _ in cluster.objects] == ["v1 PersistentVolumeClaim"]


@needs_kubectl
def test_check_asks_for_a_claim_only_if_there_is_none(cluster):
    for number_of_claims in (1, 0):
        cluster.requests.clear()
        result = launch(*WORDS, SIZE, "--check", RUN_ID="mine", **cluster.variables)
        assert (result.returncode, result.stderr) == (0, "")
        written = [path for method, path in cluster.requests if method in ("POST", "PATCH")]
        assert sum("persistentvolumeclaims" in path for path in written) == number_of_claims
        meta = {"name": "project"}
        cluster.put({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta})


UNSHARE = """
import ctypes, os, runpy, signal, sys
assert ctypes.CDLL(None).unshare(0x20000000) == 0  # CLONE_NEWPID: for the next child
child = os.fork()
if child == 0:
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""What ``unshare --pid --fork`` does, as a program that starts from the fork server."""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="needs the right to make process namespaces",
)
def test_sigterm_ends_it_although_it_is_process_1(tmp_path):
    (tmp_path / "official").mkdir()
    miniature, began = mirror.mnist(tmp_path / "official"), threading.Event()
    (tmp_path / "unshare.py").write_text(UNSHARE)
    with mirror.serve(tmp_path / "official") as official:
        official.go_on.clear()
        program = [*volume.PROGRAM[1:], *miniature.overrides(tmp_path / "volume", official.url)]
        with subprocess.Popen(
            [sys.executable, str(tmp_path / "unshare.py"), *program],
            cwd=ROOT, env=environment(no_proxy="127.0.0.1"), stderr=subprocess.DEVNULL,
        ) as outside:  # fmt: skip
            while not official.requests:
                assert outside.poll() is None
                began.wait(0.1)
            children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
            subprocess.run(["kill", f"-{signal.SIGTERM.value}", *children.split()], check=True)
            assert outside.wait(60) == 143
    assert list((tmp_path / "volume").rglob("*-ubyte")) == []
